// What happened, for tests that ask.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace sim {

struct Counters {
  std::atomic<int64_t> operations{0};
  std::atomic<int64_t> asynchronous_operations{0};
  std::atomic<int64_t> copies_between_devices{0};
};

inline Counters counters;

// Operations that made the host wait for a stream.
class HostWaits final {
 public:
  void add(const std::string& operation) {
    std::lock_guard<std::mutex> lock(mutex_);
    ++counts_[operation];
  }
  std::map<std::string, int64_t> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(counts_, {});
  }

 private:
  std::mutex mutex_;
  std::map<std::string, int64_t> counts_;
};

inline HostWaits host_waits;

} // namespace sim
