// What PyTorch asks a device for: the current device and streams, events, generators, pinned memory.

#include "current.h"
#include "kernels.h"
#include "memory.h"
#include "streams.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace sim {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

StreamKey key_of(const Stream& stream) {
  return {stream.device_index(), stream.id()};
}

Stream stream_of(StreamKey key) {
  return Stream(Stream::UNSAFE, Device(kDeviceType, static_cast<DeviceIndex>(key.device)), key.stream);
}

// PyTorch keeps an event as an untyped pointer, which is null until the event is first recorded.
using EventHandle = std::shared_ptr<Event>;

Event& event_of(void* handle) {
  return **static_cast<EventHandle*>(handle);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kDeviceType;
  }

  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override {
    return Device(kDeviceType, static_cast<DeviceIndex>(current_device()));
  }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.is_privateuseone(), "sim: ", device, " is not a simulated device");
    set_current_device(device.index());
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < device_count()) {
      set_current_device(device.index());
    }
  }
  DeviceIndex deviceCount() const noexcept override {
    return static_cast<DeviceIndex>(device_count());
  }

  Stream getStream(Device device) const noexcept override {
    return stream_of(current_stream(device));
  }
  Stream getDefaultStream(Device device) const override {
    return stream_of({device.has_index() ? device.index() : current_device(), 0});
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream getNewStream(Device device, int) const override {
    return stream_of({device.has_index() ? device.index() : current_device(), new_stream_id()});
  }
  Stream exchangeStream(Stream stream) const noexcept override {
    return stream_of(exchange_current_stream(key_of(stream)));
  }
  bool queryStream(const Stream& stream) const override {
    return is_idle(key_of(stream));
  }
  void synchronizeStream(const Stream& stream) const override {
    synchronize(key_of(stream));
  }
  void synchronizeDevice(DeviceIndex device) const override {
    synchronize_device(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    device_memory().recordStream(data, stream);
  }

  void record(void** handle, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    if (!*handle) {
      *handle = new EventHandle(std::make_shared<Event>());
    }
    event_of(*handle).record(key_of(stream));
  }
  void block(void* handle, const Stream& stream) const override {
    if (handle) {
      event_of(handle).block(key_of(stream));
    }
  }
  bool queryEvent(void* handle) const override {
    return !handle || event_of(handle).is_reached();
  }
  void synchronizeEvent(void* handle) const override {
    if (handle) {
      event_of(handle).synchronize();
    }
  }
  double elapsedTime(void* earlier, void* later, DeviceIndex) const override {
    return event_of(earlier).milliseconds_until(event_of(later));
  }
  void destroyEvent(void* handle, DeviceIndex) const noexcept override {
    delete static_cast<EventHandle*>(handle);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return static_cast<DeviceIndex>(device_count());
  }
  DeviceIndex getCurrentDevice() const override {
    return static_cast<DeviceIndex>(current_device());
  }
  void setCurrentDevice(DeviceIndex device) const override {
    set_current_device(device);
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const DeviceIndex before = getCurrentDevice();
    if (device >= 0) {
      set_current_device(device);
    }
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory();
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  // The host's generator: a run on the device draws the same random numbers as one on the CPU.
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::make_generator<at::CPUGeneratorImpl>();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

[[maybe_unused]] const bool registered = [] {
  c10::SetAllocator(kDeviceType, &device_memory());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

} // namespace
} // namespace sim
