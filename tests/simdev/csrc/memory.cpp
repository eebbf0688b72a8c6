#include "memory.h"

#include <ATen/TensorUtils.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <mutex>

namespace sim {
namespace {

constexpr size_t kAlignment = 64;

std::mutex mutex; // guards the two below
std::array<MemoryUse, kMaxDevices> uses;
std::map<const char*, size_t> pinned; // start -> bytes

void* allocate_bytes(size_t bytes) {
  if (bytes == 0) {
    return nullptr;
  }
  void* data = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  TORCH_CHECK(data, "sim: out of memory: ", bytes, " bytes");
  return data;
}

// The context of a storage's pointer is a shared pointer of its own.
void free_storage(void* context) {
  std::unique_ptr<std::shared_ptr<Block>> owner(static_cast<std::shared_ptr<Block>*>(context));
  const Block& block = **owner;
  if (block.bytes) {
    note_freed(block.accesses, block.allocated_on, block.bytes);
  }
  std::lock_guard<std::mutex> lock(mutex);
  uses[block.allocated_on.device].current -= static_cast<int64_t>(block.bytes);
}

void free_alias(void* context) {
  delete static_cast<std::shared_ptr<Block>*>(context);
}

class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = allocate_bytes(bytes);
    if (data) {
      std::lock_guard<std::mutex> lock(mutex);
      pinned[static_cast<const char*>(data)] = bytes;
    }
    return {data, data, &free_pinned, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_pinned;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

 private:
  static void free_pinned(void* data) {
    std::lock_guard<std::mutex> lock(mutex);
    pinned.erase(static_cast<const char*>(data));
    std::free(data);
  }
};

} // namespace

Block::Block(size_t bytes, StreamKey allocated_on)
    : data(allocate_bytes(bytes)), bytes(bytes), allocated_on(allocated_on) {}

Block::~Block() {
  std::free(data);
}

c10::DataPtr DeviceMemory::allocate(size_t bytes) {
  return allocate_on(current_device(), bytes);
}

c10::DataPtr DeviceMemory::allocate_on(int device, size_t bytes) {
  const StreamKey stream = current_stream(device);
  if (bytes) {
    note_allocated(stream, bytes);
  }
  auto block = std::make_shared<Block>(bytes, stream);
  void* data = block->data;
  {
    std::lock_guard<std::mutex> lock(mutex);
    MemoryUse& use = uses[device];
    use.current += static_cast<int64_t>(bytes);
    use.total += static_cast<int64_t>(bytes);
    use.peak = std::max(use.peak, use.current);
  }
  return {data, new std::shared_ptr<Block>(std::move(block)), &free_storage, c10::Device(kDeviceType, device)};
}

c10::DeleterFnPtr DeviceMemory::raw_deleter() const {
  return &free_storage;
}

void DeviceMemory::copy_data(void* to, const void* from, size_t bytes) const {
  std::memcpy(to, from, bytes);
}

bool DeviceMemory::initialized() {
  return true;
}

void DeviceMemory::emptyCache(c10::MempoolId_t) {} // nothing is cached

void DeviceMemory::recordStream(const c10::DataPtr& data, c10::Stream stream) {
  if (data.get_deleter() == &free_storage) {
    auto& block = *static_cast<std::shared_ptr<Block>*>(data.get_context());
    note_recorded(block->accesses, {stream.device_index(), stream.id()});
  }
}

c10::CachingDeviceAllocator::DeviceStats DeviceMemory::getDeviceStats(c10::DeviceIndex device) {
  const MemoryUse use = memory_use(device);
  c10::CachingDeviceAllocator::DeviceStats stats;
  for (auto* kind : {&stats.allocated_bytes, &stats.reserved_bytes}) {
    auto& all = (*kind)[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
    all.current = use.current;
    all.peak = use.peak;
    all.allocated = use.total;
    all.freed = use.total - use.current;
  }
  return stats;
}

void DeviceMemory::resetAccumulatedStats(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(mutex);
  uses.at(device).total = uses.at(device).current;
}

void DeviceMemory::resetPeakStats(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(mutex);
  uses.at(device).peak = uses.at(device).current;
}

std::pair<size_t, size_t> DeviceMemory::getMemoryInfo(c10::DeviceIndex device) {
  return {kDeviceBytes - static_cast<size_t>(memory_use(device).current), kDeviceBytes};
}

DeviceMemory& device_memory() {
  static auto* memory = new DeviceMemory; // never destroyed: tensors outlive static objects
  return *memory;
}

MemoryUse memory_use(int device) {
  std::lock_guard<std::mutex> lock(mutex);
  return uses.at(device);
}

const std::shared_ptr<Block>& block_of(const at::Tensor& tensor) {
  const auto& data = tensor.unsafeGetTensorImpl()->unsafe_storage().data_ptr();
  TORCH_INTERNAL_ASSERT(data.get_deleter() == &free_storage, "this tensor's memory is not of a simulated device");
  return *static_cast<std::shared_ptr<Block>*>(data.get_context());
}

std::vector<Accesses*> accesses_of(const std::vector<at::Tensor>& tensors) {
  std::vector<Accesses*> found;
  found.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    found.push_back(&block_of(tensor)->accesses);
  }
  return found;
}

at::Tensor host_alias(const at::Tensor& tensor) {
  const std::shared_ptr<Block>& block = block_of(tensor);
  c10::DataPtr data(block->data, new std::shared_ptr<Block>(block), &free_alias, at::kCPU);
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), block->bytes, std::move(data), c10::GetCPUAllocator(), /*resizable=*/true);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true); // type promotion depends on it
  }
  return alias;
}

c10::Allocator& pinned_memory() {
  static auto* memory = new PinnedMemory;
  return *memory;
}

bool is_pinned(const void* pointer) {
  const char* address = static_cast<const char*>(pointer);
  std::lock_guard<std::mutex> lock(mutex);
  auto after = pinned.upper_bound(address);
  return after != pinned.begin() && address < std::prev(after)->first + std::prev(after)->second;
}

} // namespace sim
