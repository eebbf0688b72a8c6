// Vector clocks, and the race check built on them.
//
// Every stream counts what is launched on it. A stream's clock says, for each stream, up to which launch the work
// is certain to be finished before anything that is launched on it from now on. Events and host synchronisation
// merge clocks. Two accesses to a block are ordered when the earlier one lies inside the clock of the later one's
// stream. Clocks advance at launch, so what is reported does not depend on how fast anything runs, and the check
// works in synchronous mode too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <ostream>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace sim {

struct StreamKey {
  int device;
  int64_t stream;
};

inline bool operator<(const StreamKey& a, const StreamKey& b) {
  return std::tie(a.device, a.stream) < std::tie(b.device, b.stream);
}
inline bool operator==(const StreamKey& a, const StreamKey& b) {
  return std::tie(a.device, a.stream) == std::tie(b.device, b.stream);
}
std::ostream& operator<<(std::ostream& out, const StreamKey& key);

using Time = uint64_t;
using Clock = std::map<StreamKey, Time>;

// What the check remembers of one block of memory.
struct Accesses {
  std::optional<std::pair<StreamKey, Time>> last_write;
  Clock reads_since;
  std::set<StreamKey> recorded_streams; // by Tensor.record_stream
};

// 0: off, 1: collect reports, 2: raise at the operation that is not ordered.
void set_race_check(int level);
bool race_check_is_on();

// Return the reports and forget them.
std::vector<std::string> take_races();

// An operation is launched on a stream; what it reads and writes must be ordered after earlier uses.
void note_operation(
    const std::vector<Accesses*>& reads,
    const std::vector<Accesses*>& writes,
    StreamKey on,
    const std::string& operation);

// The latest operation of a stream made this block itself, so nothing can have used it before.
void note_result(Accesses& made, StreamKey on);

// Tensor.record_stream: the block is given back only when this stream's work is done.
void note_recorded(Accesses& block, StreamKey stream);

// What a stream has seen so far: the meaning of an event that is recorded now.
Clock clock_of(StreamKey stream);
void note_stream_waits(StreamKey waiting, const Clock& seen);
void note_host_waits(const Clock& seen);
void note_host_waits(StreamKey stream);
std::set<StreamKey> streams_seen_on(int device);

// A caching allocator hands a freed block out again to the stream that it was allocated on, at once. That is an
// error when another stream may still be using it. Reported when the memory is asked for again: until then the
// stream can still wait.
void note_freed(const Accesses& accesses, StreamKey allocated_on, size_t bytes);
void note_allocated(StreamKey on, size_t bytes);

} // namespace sim
