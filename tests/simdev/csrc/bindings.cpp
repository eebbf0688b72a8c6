// What Python sees.

#include "clocks.h"
#include "counters.h"
#include "current.h"
#include "fallback.h"
#include "memory.h"
#include "streams.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <thread>

namespace {

void sleep_on_current_stream(double milliseconds) {
  const std::chrono::duration<double, std::milli> time(milliseconds);
  sim::submit(sim::current_stream(sim::current_device()), [time] { std::this_thread::sleep_for(time); });
}

std::map<std::string, int64_t> stats() {
  return {
      {"ops", sim::counters.operations},
      {"async_ops", sim::counters.asynchronous_operations},
      {"xdev_copies", sim::counters.copies_between_devices},
  };
}

std::tuple<int64_t, int64_t> memory(int device) {
  const sim::MemoryUse use = sim::memory_use(device);
  return {use.current, use.peak};
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("set_device_count", &sim::set_device_count);
  module.def("device_count", &sim::device_count);
  module.def("current_device", &sim::current_device);
  module.def("set_device", &sim::set_current_device);
  module.def("synchronize", &sim::synchronize_device);
  module.def("memory", &memory);
  module.def("set_async", &sim::set_asynchronous);
  module.def("set_race_check", &sim::set_race_check);
  module.def("races", &sim::take_races);
  module.def("set_op_delay_us", [](int64_t delay) { sim::set_operation_delay(std::chrono::microseconds(delay)); });
  module.def("sleep_ms", &sleep_on_current_stream);
  module.def("stats", &stats);
  module.def("sync_ops", [] { return sim::host_waits.take(); });
  module.def("nometa", &sim::operations_without_shapes);
  module.def("shutdown", &sim::stop_workers);
}
