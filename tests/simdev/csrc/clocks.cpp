#include "clocks.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <atomic>
#include <mutex>

namespace sim {
namespace {

enum Level { kOff = 0, kCollect = 1, kRaise = 2 };

struct FreedInUse {
  size_t bytes;
  Clock uses;
};

std::atomic<int> level{kOff};
std::mutex mutex; // guards everything below
std::vector<std::string> reports;
Clock host_clock; // what the host has waited for
std::map<StreamKey, Clock> clocks;
std::map<StreamKey, std::vector<FreedInUse>> freed_in_use;

void merge(Clock& into, const Clock& from) {
  for (const auto& [stream, time] : from) {
    Time& known = into[stream];
    known = std::max(known, time);
  }
}

bool reaches(const Clock& clock, StreamKey stream, Time time) {
  auto found = clock.find(stream);
  return found != clock.end() && found->second >= time;
}

void report(const std::string& text) {
  reports.push_back(text);
  TORCH_CHECK(level != kRaise, "sim race: ", text);
}

} // namespace

std::ostream& operator<<(std::ostream& out, const StreamKey& key) {
  return out << "sim:" << key.device << "/stream" << key.stream;
}

void set_race_check(int new_level) {
  TORCH_CHECK(new_level >= kOff && new_level <= kRaise, "sim: the race check is 0, 1 or 2, not ", new_level);
  level = new_level;
}

bool race_check_is_on() {
  return level != kOff;
}

std::vector<std::string> take_races() {
  std::lock_guard<std::mutex> lock(mutex);
  return std::exchange(reports, {});
}

void note_operation(
    const std::vector<Accesses*>& reads,
    const std::vector<Accesses*>& writes,
    StreamKey on,
    const std::string& operation) {
  if (!race_check_is_on()) {
    return;
  }
  std::lock_guard<std::mutex> lock(mutex);
  Clock& seen = clocks[on];
  merge(seen, host_clock); // the host launches this after everything that it has waited for
  const Time now = ++seen[on];
  auto check_write = [&](const Accesses& block, const char* does) {
    if (block.last_write && !reaches(seen, block.last_write->first, block.last_write->second)) {
      report(c10::str(
          operation, " on ", on, " ", does, " data written on ", block.last_write->first, " without waiting"));
    }
  };
  for (Accesses* block : reads) {
    check_write(*block, "reads");
    block->reads_since[on] = now;
  }
  for (Accesses* block : writes) {
    check_write(*block, "overwrites");
    for (const auto& [reader, time] : block->reads_since) {
      if (!reaches(seen, reader, time)) {
        report(c10::str(operation, " on ", on, " overwrites data still read on ", reader, " without waiting"));
      }
    }
    block->reads_since.clear();
    block->last_write = {on, now};
  }
}

void note_result(Accesses& made, StreamKey on) {
  if (!race_check_is_on()) {
    return;
  }
  std::lock_guard<std::mutex> lock(mutex);
  made.last_write = {on, clocks[on][on]};
}

void note_recorded(Accesses& block, StreamKey stream) {
  std::lock_guard<std::mutex> lock(mutex);
  block.recorded_streams.insert(stream);
}

Clock clock_of(StreamKey stream) {
  std::lock_guard<std::mutex> lock(mutex);
  Clock& seen = clocks[stream];
  merge(seen, host_clock);
  return seen;
}

void note_stream_waits(StreamKey waiting, const Clock& seen) {
  std::lock_guard<std::mutex> lock(mutex);
  merge(clocks[waiting], seen);
}

void note_host_waits(const Clock& seen) {
  std::lock_guard<std::mutex> lock(mutex);
  merge(host_clock, seen);
}

void note_host_waits(StreamKey stream) {
  std::lock_guard<std::mutex> lock(mutex);
  merge(host_clock, clocks[stream]);
}

std::set<StreamKey> streams_seen_on(int device) {
  std::lock_guard<std::mutex> lock(mutex);
  std::set<StreamKey> found;
  for (const auto& [stream, clock] : clocks) {
    if (stream.device == device) {
      found.insert(stream);
    }
  }
  return found;
}

void note_freed(const Accesses& accesses, StreamKey allocated_on, size_t bytes) {
  if (!race_check_is_on()) {
    return;
  }
  std::lock_guard<std::mutex> lock(mutex);
  const Clock& owner = clocks[allocated_on];
  Clock uses = accesses.reads_since;
  if (accesses.last_write) {
    merge(uses, {*accesses.last_write});
  }
  for (auto use = uses.begin(); use != uses.end();) {
    const auto& [stream, time] = *use;
    // Another device writes here only by a copy between devices, and the receiving stream waits for that.
    const bool harmless = stream == allocated_on || stream.device != allocated_on.device ||
        accesses.recorded_streams.count(stream) || reaches(owner, stream, time) || reaches(host_clock, stream, time);
    use = harmless ? uses.erase(use) : std::next(use);
  }
  if (!uses.empty()) {
    freed_in_use[allocated_on].push_back({bytes, uses});
  }
}

void note_allocated(StreamKey on, size_t bytes) {
  if (!race_check_is_on()) {
    return;
  }
  std::lock_guard<std::mutex> lock(mutex);
  auto& waiting = freed_in_use[on];
  auto fits = [&](const FreedInUse& freed) { return freed.bytes >= bytes; };
  auto found = std::find_if(waiting.begin(), waiting.end(), fits);
  if (found == waiting.end()) {
    return;
  }
  const FreedInUse reused = *found;
  waiting.erase(found);
  for (const auto& [stream, time] : reused.uses) {
    if (!reaches(clocks[on], stream, time) && !reaches(host_clock, stream, time)) {
      report(c10::str(
          "block of ", reused.bytes, "B allocated on ", on, ", freed and reusable there while still in use on ",
          stream, " (missing record_stream)"));
    }
  }
}

} // namespace sim
