// Streams with a worker thread each, and events between them.
#pragma once

#include "clocks.h"

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>

namespace sim {

// Off (the default): work runs when it is launched. On: each stream has a thread that runs its work in order.
void set_asynchronous(bool on);
bool asynchronous();

// What each operation takes at least, so that overlap can be measured where there are few cores.
void set_operation_delay(std::chrono::microseconds delay);
void sleep_operation_delay();

int64_t new_stream_id();
void submit(StreamKey stream, std::function<void()> work);

// Wait on the host. An error that the stream's work ended with is raised here, once.
void synchronize(StreamKey stream);
void synchronize_device(int device);
bool is_idle(StreamKey stream);

// At the end of the process: finish what is launched and end the threads.
void stop_workers();

// Can be recorded again and again; who waits does so for the latest recording at the time of its call.
class Event final : public std::enable_shared_from_this<Event> {
 public:
  void record(StreamKey on);
  void block(StreamKey waiting);
  void synchronize();
  bool is_reached();
  double milliseconds_until(Event& later);

 private:
  std::mutex mutex_; // guards all below
  std::condition_variable changed_;
  uint64_t recorded_ = 0;
  uint64_t reached_ = 0;
  std::chrono::steady_clock::time_point when_;
  Clock seen_;
};

} // namespace sim
