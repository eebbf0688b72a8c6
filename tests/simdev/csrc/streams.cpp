#include "streams.h"

#include "current.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <Python.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <exception>
#include <set>
#include <thread>

namespace sim {
namespace {

// The host waits without the GIL: work that is waited for may need it to drop a tensor that Python knows.
class WithoutGil final {
 public:
  WithoutGil() : state_(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_) {
      PyEval_RestoreThread(state_);
    }
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// Autograd has done its part when work gets here; CPU kernels must not do it again.
void run_below_autograd(const std::function<void()>& work) {
  at::AutoDispatchBelowADInplaceOrView below;
  work();
}

class Worker final {
 public:
  void push(std::function<void()> work) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!thread_.joinable()) {
        thread_ = std::thread([this] { loop(); });
      }
      queue_.push_back(std::move(work));
    }
    changed_.notify_all();
  }

  bool is_idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return queue_.empty() && !busy_;
  }

  void drain() {
    std::exception_ptr error;
    {
      WithoutGil without;
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return queue_.empty() && !busy_; });
      std::swap(error, error_);
    }
    if (error) {
      std::rethrow_exception(error);
    }
  }

  void stop() {
    WithoutGil without;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) {
      thread_.join();
    }
  }

 private:
  void loop() {
    at::set_num_threads(1);
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        busy_ = false;
        changed_.notify_all();
        changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
        if (queue_.empty()) {
          return;
        }
        work = std::move(queue_.front());
        queue_.pop_front();
        busy_ = true;
      }
      try {
        run_below_autograd(work);
      } catch (...) {
        std::lock_guard<std::mutex> lock(mutex_);
        error_ = error_ ? error_ : std::current_exception();
      }
      work = nullptr; // what it held is gone before the stream counts as idle
    }
  }

  std::mutex mutex_; // guards all below but the thread
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool busy_ = false;
  bool stopping_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

std::atomic<bool> is_asynchronous{false};
std::atomic<int64_t> delay_microseconds{0};
std::atomic<int64_t> next_stream{1};
std::mutex workers_mutex;
std::map<StreamKey, std::unique_ptr<Worker>>& workers() {
  static auto* all = new std::map<StreamKey, std::unique_ptr<Worker>>; // threads may outlive static objects
  return *all;
}

Worker& worker_of(StreamKey stream) {
  std::lock_guard<std::mutex> lock(workers_mutex);
  auto& worker = workers()[stream];
  if (!worker) {
    worker = std::make_unique<Worker>();
  }
  return *worker;
}

} // namespace

void set_asynchronous(bool on) {
  for (int device = 0; device < device_count(); ++device) {
    synchronize_device(device);
  }
  is_asynchronous = on;
}

bool asynchronous() {
  return is_asynchronous;
}

void set_operation_delay(std::chrono::microseconds delay) {
  delay_microseconds = delay.count();
}

void sleep_operation_delay() {
  if (const int64_t delay = delay_microseconds) {
    std::this_thread::sleep_for(std::chrono::microseconds(delay));
  }
}

int64_t new_stream_id() {
  return next_stream++;
}

void submit(StreamKey stream, std::function<void()> work) {
  if (asynchronous()) {
    worker_of(stream).push(std::move(work));
  } else {
    run_below_autograd(work);
  }
}

void synchronize(StreamKey stream) {
  if (asynchronous()) {
    worker_of(stream).drain();
  }
  note_host_waits(stream);
}

void synchronize_device(int device) {
  std::set<StreamKey> streams = streams_seen_on(device);
  {
    std::lock_guard<std::mutex> lock(workers_mutex);
    for (const auto& [stream, worker] : workers()) {
      if (stream.device == device) {
        streams.insert(stream);
      }
    }
  }
  for (StreamKey stream : streams) {
    synchronize(stream);
  }
}

bool is_idle(StreamKey stream) {
  return !asynchronous() || worker_of(stream).is_idle();
}

void stop_workers() {
  std::vector<Worker*> all;
  {
    std::lock_guard<std::mutex> lock(workers_mutex);
    for (auto& [stream, worker] : workers()) {
      all.push_back(worker.get());
    }
  }
  for (Worker* worker : all) {
    worker->stop();
  }
}

void Event::record(StreamKey on) {
  uint64_t version;
  Clock seen = clock_of(on);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    version = ++recorded_;
    seen_ = std::move(seen);
  }
  submit(on, [event = shared_from_this(), version] {
    std::lock_guard<std::mutex> lock(event->mutex_);
    event->reached_ = std::max(event->reached_, version);
    event->when_ = std::chrono::steady_clock::now();
    event->changed_.notify_all();
  });
}

void Event::block(StreamKey waiting) {
  uint64_t version;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    version = recorded_;
    note_stream_waits(waiting, seen_);
  }
  submit(waiting, [event = shared_from_this(), version] {
    std::unique_lock<std::mutex> lock(event->mutex_);
    event->changed_.wait(lock, [&] { return event->reached_ >= version; });
  });
}

void Event::synchronize() {
  Clock seen;
  {
    WithoutGil without;
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return reached_ >= recorded_; });
    seen = seen_;
  }
  note_host_waits(seen);
}

bool Event::is_reached() {
  std::lock_guard<std::mutex> lock(mutex_);
  return reached_ >= recorded_;
}

double Event::milliseconds_until(Event& later) {
  if (&later == this) {
    return 0;
  }
  std::scoped_lock lock(mutex_, later.mutex_);
  return std::chrono::duration<double, std::milli>(later.when_ - when_).count();
}

} // namespace sim
