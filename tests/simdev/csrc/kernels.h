// The kernels that touch storages, and so cannot run on a CPU alias.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

namespace sim {

at::Tensor empty_strided_on_current_device(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);
const at::Tensor& resize(
    const at::Tensor& self,
    at::IntArrayRef sizes,
    std::optional<at::MemoryFormat> format = std::nullopt);
void resize_storage(const c10::Storage& storage, size_t bytes);

} // namespace sim
