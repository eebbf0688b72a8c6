// How many devices there are, and which device and streams this thread uses.
#pragma once

#include "clocks.h"

#include <c10/core/Device.h>

#include <optional>

namespace sim {

constexpr auto kDeviceType = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 16;
constexpr size_t kDeviceBytes = 8ull << 30; // what each device claims to have

void set_device_count(int count);
int device_count();

// Of this thread. Work goes to the current stream of the device that its tensors are on.
int current_device();
void set_current_device(int device);
StreamKey current_stream(int device);
// Return the stream that was current on that device.
StreamKey exchange_current_stream(StreamKey stream);

inline StreamKey current_stream(const c10::Device& device) {
  return current_stream(device.has_index() ? device.index() : current_device());
}

// Makes a device current while it lives; nullopt leaves everything as it is.
class DeviceSwitch final {
 public:
  explicit DeviceSwitch(std::optional<c10::Device> device) : before_(current_device()) {
    if (device && device->has_index()) {
      set_current_device(device->index());
    }
  }
  ~DeviceSwitch() {
    set_current_device(before_);
  }
  DeviceSwitch(const DeviceSwitch&) = delete;
  DeviceSwitch& operator=(const DeviceSwitch&) = delete;

 private:
  int before_;
};

} // namespace sim
