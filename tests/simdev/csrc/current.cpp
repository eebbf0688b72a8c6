#include "current.h"

#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <utility>

namespace sim {
namespace {

std::atomic<int> num_devices{2};
thread_local int device_of_thread = 0;
thread_local std::array<int64_t, kMaxDevices> streams_of_thread{}; // 0 is each device's default stream

} // namespace

void set_device_count(int count) {
  TORCH_CHECK(count >= 1 && count <= kMaxDevices, "sim: 1 to ", kMaxDevices, " devices, not ", count);
  num_devices = count;
}

int device_count() {
  return num_devices;
}

int current_device() {
  return device_of_thread;
}

void set_current_device(int device) {
  TORCH_CHECK(
      device >= 0 && device < device_count(),
      "sim: invalid device ordinal ", device, "; there are ", device_count(), " devices");
  device_of_thread = device;
}

StreamKey current_stream(int device) {
  return {device, streams_of_thread.at(device)};
}

StreamKey exchange_current_stream(StreamKey stream) {
  return {stream.device, std::exchange(streams_of_thread.at(stream.device), stream.stream)};
}

} // namespace sim
