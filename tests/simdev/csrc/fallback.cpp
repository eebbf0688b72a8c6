// Every other operation: run PyTorch's own CPU kernel on CPU aliases of the device tensors.
//
// PyTorch has a helper of that kind, which copies all arguments to the host and back. Aliases cost nothing, keep
// in-place and out= variants in place, and let the operation run later on a stream's thread.

#include "fallback.h"

#include "counters.h"
#include "current.h"
#include "kernels.h"
#include "memory.h"
#include "streams.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

namespace sim {
namespace {

using at::Tensor;
using Values = std::vector<c10::IValue>;

// Operations whose results the Meta kernels do not know without the numbers. Found out by trying.
struct KnownOperations {
  std::mutex mutex;
  std::set<std::string> without_shapes{"aten::_local_scalar_dense"};
} known;

// Replace each defined tensor of an argument or a result.
template <class Change>
void change_tensors(c10::IValue& value, Change change) {
  if (value.isTensor()) {
    if (const Tensor tensor = value.toTensor(); tensor.defined()) {
      value = change(tensor);
    }
  } else if (value.isTensorList()) {
    std::vector<Tensor> tensors = value.toTensorVector();
    for (Tensor& tensor : tensors) {
      tensor = tensor.defined() ? change(tensor) : tensor;
    }
    value = tensors;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
      changed.push_back(tensor && tensor->defined() ? std::optional<Tensor>(change(*tensor)) : tensor);
    }
    value = changed;
  }
}

template <class See>
void see_tensors(c10::IValue value, See see) {
  change_tensors(value, [&](const Tensor& tensor) {
    see(tensor);
    return tensor;
  });
}

bool is_single_device_tensor(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && value.toTensor().is_privateuseone();
}

// Indexing takes its indices from the host too, and a mask among them makes the result's shape depend on numbers.
bool takes_indices(const std::string& name) {
  for (const char* prefix : {"aten::index.", "aten::index_put", "aten::_index_put", "aten::_unsafe_index"}) {
    if (name.rfind(prefix, 0) == 0) {
      return true;
    }
  }
  return false;
}

struct Call {
  const c10::OperatorHandle& op;
  std::string name;
  Values arguments;
  c10::Device device;
  StreamKey stream;
  std::vector<Tensor> reads;
  std::vector<Tensor> writes;
  // For each result: the argument that it is, with in-place and out= variants.
  std::vector<std::optional<size_t>> same_as_argument;
};

template <class First, class Second>
[[noreturn]] void refuse_mixture(const First& one, const Second& other, const std::string& name) {
  TORCH_CHECK(
      false,
      "Expected all tensors to be on the same device, but found at least two devices, ", one, " and ", other, "! (",
      name, ")");
}

c10::Device device_of(const Values& arguments, const std::string& name) {
  std::optional<c10::Device> device;
  for (const c10::IValue& value : arguments) {
    see_tensors(value, [&](const Tensor& tensor) {
      if (!tensor.is_privateuseone()) {
        return;
      }
      if (device && *device != tensor.device()) {
        refuse_mixture(*device, tensor.device(), name);
      }
      device = tensor.device();
    });
  }
  for (const c10::IValue& value : arguments) { // factories
    if (!device && value.isDevice() && value.toDevice().is_privateuseone() && value.toDevice().has_index()) {
      device = value.toDevice();
    }
  }
  const c10::Device found = device.value_or(c10::Device(kDeviceType, current_device()));
  const bool indices = takes_indices(name);
  for (const c10::IValue& value : arguments) {
    see_tensors(value, [&](const Tensor& tensor) {
      const bool allowed = tensor.is_cpu() && (tensor.dim() == 0 || indices);
      if (!tensor.is_privateuseone() && !allowed) {
        refuse_mixture(found, tensor.device(), name);
      }
    });
  }
  return found;
}

Call describe(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& schema = op.schema();
  std::string name = toString(op.operator_name());
  Values arguments = torch::jit::last(stack, schema.arguments().size()).vec();
  const c10::Device device = device_of(arguments, name);
  Call call{op, std::move(name), std::move(arguments), device, current_stream(device), {}, {}, {}};
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    see_tensors(call.arguments[i], [&](const Tensor& tensor) {
      if (tensor.is_privateuseone()) {
        (alias && alias->isWrite() ? call.writes : call.reads).push_back(tensor);
      }
    });
  }
  for (const auto& result : schema.returns()) {
    auto& same = call.same_as_argument.emplace_back();
    if (const auto* alias = result.alias_info()) {
      TORCH_CHECK(alias->isWrite(), "sim: the view operation ", call.name, " has no kernel");
      for (size_t i = 0; i < call.arguments.size(); ++i) {
        const auto* other = schema.arguments()[i].alias_info();
        if (other && other->beforeSets() == alias->beforeSets()) {
          same = i;
        }
      }
    }
  }
  return call;
}

Values on_host(const Values& arguments) {
  Values changed = arguments;
  for (c10::IValue& value : changed) {
    if (value.isDevice()) {
      value = c10::Device(at::kCPU);
    }
    // A number on the host is read now: the program may change it before the stream gets here.
    change_tensors(value, [](const Tensor& t) { return t.is_privateuseone() ? host_alias(t) : t.clone(); });
  }
  return changed;
}

Values on_meta(const Values& arguments) {
  Values changed = arguments;
  for (c10::IValue& value : changed) {
    if (value.isDevice()) {
      value = c10::Device(at::kMeta);
    }
    change_tensors(value, [](const Tensor& tensor) {
      if (!tensor.is_privateuseone()) {
        return tensor;
      }
      auto meta = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
        meta.unsafeGetTensorImpl()->set_wrapped_number(true);
      }
      return meta;
    });
  }
  return changed;
}

Tensor device_tensor_like(const Tensor& tensor) {
  return empty_strided_on_current_device(tensor.sizes(), tensor.strides(), tensor.scalar_type());
}

bool must_run_at_once(const Call& call) {
  // Random numbers come from the host's generator, in the order of the program.
  if (call.op.hasTag(at::Tag::nondeterministic_seeded) || call.op.hasTag(at::Tag::data_dependent_output) ||
      takes_indices(call.name)) {
    return true;
  }
  std::lock_guard<std::mutex> lock(known.mutex);
  return known.without_shapes.count(call.name) > 0;
}

// Results on the Meta device; `arguments` are resized where the operation resizes them.
std::optional<Values> results_on_meta(const Call& call, const Values& arguments) {
  torch::jit::Stack stack(arguments.begin(), arguments.end());
  bool complete = true;
  try {
    call.op.callBoxed(&stack);
    for (const c10::IValue& value : stack) {
      complete = complete && (value.isTensor() || value.isTensorList());
    }
  } catch (const std::exception&) {
    complete = false;
  }
  if (!complete) {
    std::lock_guard<std::mutex> lock(known.mutex);
    known.without_shapes.insert(call.name);
    return std::nullopt;
  }
  return Values(stack.begin(), stack.end());
}

// Allocate the results and leave the computation to the stream's thread. Nullopt: this has to run at once.
std::optional<Values> launch(Call& call) {
  if (must_run_at_once(call)) {
    return std::nullopt;
  }
  const Values meta = on_meta(call.arguments);
  const std::optional<Values> shapes = results_on_meta(call, meta);
  if (!shapes) {
    return std::nullopt;
  }
  for (size_t i = 0; i < meta.size(); ++i) {
    if (is_single_device_tensor(call.arguments[i])) {
      resize(call.arguments[i].toTensor(), meta[i].toTensor().sizes());
    }
  }
  Values results;
  std::vector<Tensor> targets;
  for (size_t r = 0; r < shapes->size(); ++r) {
    if (call.same_as_argument[r]) {
      results.push_back(call.arguments[*call.same_as_argument[r]]);
      continue;
    }
    change_tensors(results.emplace_back((*shapes)[r]), [&](const Tensor& shape) {
      Tensor made = device_tensor_like(shape);
      call.writes.push_back(made);
      targets.push_back(host_alias(made));
      return made;
    });
  }
  note_operation(accesses_of(call.reads), accesses_of(call.writes), call.stream, call.name);
  ++counters.asynchronous_operations;
  submit(call.stream, [op = call.op, arguments = on_host(call.arguments), targets, same = call.same_as_argument] {
    sleep_operation_delay();
    torch::jit::Stack stack(arguments.begin(), arguments.end());
    op.callBoxed(&stack);
    auto target = targets.begin();
    for (size_t r = 0; r < same.size(); ++r) {
      if (!same[r]) {
        see_tensors(stack[r], [&](const Tensor& computed) { (target++)->copy_(computed); });
      }
    }
  });
  return results;
}

// An out= variant may have given the CPU alias other memory than the device tensor's.
void take_back_resized(const Call& call, const Values& host) {
  for (size_t i = 0; i < host.size(); ++i) {
    if (!call.op.schema().arguments()[i].alias_info() || !is_single_device_tensor(call.arguments[i])) {
      continue;
    }
    const Tensor tensor = call.arguments[i].toTensor(), alias = host[i].toTensor();
    const char* start = static_cast<const char*>(block_of(tensor)->data);
    if (alias.sizes() != tensor.sizes() ||
        alias.const_data_ptr() != start + tensor.storage_offset() * tensor.itemsize()) {
      resize(tensor, alias.sizes());
      host_alias(tensor).copy_(alias);
    }
  }
}

Values run_at_once(const Call& call) {
  note_operation(accesses_of(call.reads), accesses_of(call.writes), call.stream, call.name);
  if (asynchronous()) {
    host_waits.add(call.name);
    synchronize(call.stream);
  }
  sleep_operation_delay();
  const Values host = on_host(call.arguments);
  torch::jit::Stack stack(host.begin(), host.end());
  call.op.callBoxed(&stack);
  take_back_resized(call, host);
  Values results;
  for (size_t r = 0; r < stack.size(); ++r) {
    if (call.same_as_argument[r]) {
      results.push_back(call.arguments[*call.same_as_argument[r]]);
      continue;
    }
    change_tensors(results.emplace_back(stack[r]), [&](const Tensor& computed) {
      Tensor made = device_tensor_like(computed);
      host_alias(made).copy_(computed);
      note_result(block_of(made)->accesses, call.stream);
      return made;
    });
  }
  return results;
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  ++counters.operations;
  Call call = describe(op, *stack);
  DeviceSwitch on(call.device);
  at::AutoDispatchBelowADInplaceOrView below;
  std::optional<Values> results = asynchronous() ? launch(call) : std::nullopt;
  if (!results) {
    results = run_at_once(call);
  }
  torch::jit::drop(*stack, call.arguments.size());
  stack->insert(stack->end(), results->begin(), results->end());
}

} // namespace

std::set<std::string> operations_without_shapes() {
  std::lock_guard<std::mutex> lock(known.mutex);
  return known.without_shapes;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

} // namespace sim
