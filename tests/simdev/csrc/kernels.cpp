#include "kernels.h"

#include "counters.h"
#include "current.h"
#include "memory.h"
#include "streams.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstring>

namespace sim {
namespace {

using at::IntArrayRef;
using at::Tensor;
using std::optional;

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

Tensor empty(
    IntArrayRef sizes,
    optional<at::ScalarType> dtype,
    optional<at::Layout>,
    optional<c10::Device> device,
    optional<bool> /*pin_memory*/,
    optional<at::MemoryFormat> format) {
  DeviceSwitch on(device);
  return at::detail::empty_generic(sizes, &device_memory(), kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    IntArrayRef sizes,
    IntArrayRef strides,
    optional<at::ScalarType> dtype,
    optional<at::Layout>,
    optional<c10::Device> device,
    optional<bool> /*pin_memory*/) {
  DeviceSwitch on(device);
  return empty_strided_on_current_device(sizes, strides, c10::dtype_or_default(dtype));
}

void submit_copy(StreamKey stream, Tensor from, Tensor to) {
  submit(stream, [from, to]() mutable {
    sleep_operation_delay();
    to.copy_(from);
  });
}

void wait_for(StreamKey waiting, StreamKey other) {
  auto event = std::make_shared<Event>();
  event->record(other);
  event->block(waiting);
}

// As CUDA's backend does: the copy runs on the source's stream, which first waits for the target's (the target may
// still be in use), and the target's stream waits for the copy.
void copy_on_devices(const Tensor& from, const Tensor& to) {
  const StreamKey source = current_stream(from.device()), target = current_stream(to.device());
  const bool between = source.device != target.device;
  if (between) {
    ++counters.copies_between_devices;
    wait_for(source, target);
  }
  note_operation(accesses_of({from}), accesses_of({to}), source, "copy_");
  submit_copy(source, host_alias(from), host_alias(to));
  if (between) {
    wait_for(target, source);
  }
}

void copy_to_device(const Tensor& from, const Tensor& to, bool non_blocking) {
  const StreamKey stream = current_stream(to.device());
  note_operation({}, accesses_of({to}), stream, "copy_h2d");
  // Pageable memory of a copy that shall not block, and single numbers, are staged; pinned memory is read later.
  const bool pinned = from.is_pinned();
  const bool staged = !(non_blocking && pinned) && (non_blocking || from.numel() == 1);
  submit_copy(stream, staged ? from.clone() : from, host_alias(to));
  if (!staged && !(non_blocking && pinned)) {
    host_waits.add("copy_h2d");
    synchronize(stream);
  }
}

void copy_to_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  const StreamKey stream = current_stream(from.device());
  note_operation(accesses_of({from}), {}, stream, "copy_d2h");
  submit_copy(stream, host_alias(from), to);
  if (!(non_blocking && to.is_pinned())) {
    host_waits.add("copy_d2h");
    synchronize(stream);
  }
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (from.numel() == 0) {
    return to;
  }
  if (!from.is_privateuseone()) {
    copy_to_device(from, to, non_blocking);
  } else if (!to.is_privateuseone()) {
    copy_to_host(from, to, non_blocking);
  } else {
    copy_on_devices(from, to);
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, /*non_blocking=*/false);
}

at::Scalar item(const Tensor& self) {
  const StreamKey stream = current_stream(self.device());
  note_operation(accesses_of({self}), {}, stream, "item");
  host_waits.add("item");
  synchronize(stream);
  return at::native::_local_scalar_dense_cpu(host_alias(self));
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, IntArrayRef sizes, IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (strides.data() && strides.size() == sizes.size()) {
    impl->set_sizes_and_strides(sizes, strides, offset);
  } else {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(sizes);
  }
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage storage) {
  const auto length = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {length}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& other) {
  return set_storage(self, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

Tensor& set_nothing(Tensor& self) {
  at::Storage storage(
      at::Storage::use_byte_size_t(),
      0,
      device_memory().allocate_on(self.device().index(), 0),
      &device_memory(),
      /*resizable=*/true);
  return set_storage(self, std::move(storage), 0, {0}, {});
}

void record_stream(Tensor& self, at::Stream stream) {
  device_memory().recordStream(self.storage().data_ptr(), stream);
}

bool is_pinned_tensor(const Tensor&, optional<c10::Device>) {
  return false; // only host memory can be
}

} // namespace

Tensor empty_strided_on_current_device(IntArrayRef sizes, IntArrayRef strides, at::ScalarType dtype) {
  return at::detail::empty_strided_generic(sizes, strides, &device_memory(), kKeys, dtype);
}

const Tensor& resize(const Tensor& self, IntArrayRef sizes, optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != sizes) {
    const size_t needed = (c10::multiply_integers(sizes) + self.storage_offset()) * self.itemsize();
    if (impl->unsafe_storage().nbytes() < needed) {
      resize_storage(impl->unsafe_storage(), needed);
    }
    impl->set_sizes_contiguous(sizes);
  }
  if (format && *format != at::MemoryFormat::Preserve) {
    impl->empty_tensor_restride(*format);
  }
  return self;
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  const int device = storage.device().index();
  c10::DataPtr data = device_memory().allocate_on(device, bytes);
  if (storage.nbytes()) {
    host_waits.add("storage_resize");
    synchronize(current_stream(device));
    if (bytes) {
      std::memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    }
  }
  storage.set_data_ptr(std::move(data));
  storage.set_nbytes(bytes);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("resize_", resize);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", item);
  library.impl("set_", set_nothing);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("record_stream", record_stream);
  library.impl("is_pinned", is_pinned_tensor);
}

} // namespace sim
