// Device memory in host memory: blocks, statistics per device, and pinned host memory.
#pragma once

#include "clocks.h"
#include "current.h"

#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <memory>

namespace sim {

// Bytes of a device. Shared by the storage and by every operation that is still to run on them, so an operation
// that comes too late reads old numbers instead of crashing; the race check is what reports it.
struct Block {
  Block(size_t bytes, StreamKey allocated_on);
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  void* data;
  const size_t bytes;
  const StreamKey allocated_on;
  Accesses accesses;
};

struct MemoryUse {
  int64_t current = 0;
  int64_t peak = 0;
  int64_t total = 0; // of all allocations so far
};

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  // On the current device.
  c10::DataPtr allocate(size_t bytes) override;
  c10::DataPtr allocate_on(int device, size_t bytes);
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t bytes) const override;
  bool initialized() override;
  void emptyCache(c10::MempoolId_t pool) override;
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override;
};

DeviceMemory& device_memory();
MemoryUse memory_use(int device);

// The block behind a tensor of a simulated device.
const std::shared_ptr<Block>& block_of(const at::Tensor& tensor);
std::vector<Accesses*> accesses_of(const std::vector<at::Tensor>& tensors);

// A CPU tensor over the same bytes. It keeps the block alive, not the storage: what it is used for does not count
// as allocated any more once the tensor itself is gone.
at::Tensor host_alias(const at::Tensor& tensor);

c10::Allocator& pinned_memory();
bool is_pinned(const void* pointer);

} // namespace sim
