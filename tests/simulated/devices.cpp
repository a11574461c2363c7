// Simulated devices sim:0, sim:1, ...: tensors of different ones cannot be mixed, nor with the CPU's, and autograd has
// a thread for each, as with several GPUs. Their memory is the host's, and torch's fallback runs the CPU's kernels on it.
//
// Tensors say they are on PyTorch's PrivateUse1, the device kind for backends outside of it, and are dispatched as
// HPU's, which is a key without kernels in the packages people install: unlike PrivateUse1's, parameters with it stay
// the same objects under Module.to, as on a GPU.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <string>

namespace {

using at::Tensor;
using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::DispatchKey, c10::DispatchKeySet, c10::Stream;

constexpr DeviceType KIND = DeviceType::PrivateUse1;
const DispatchKeySet KEYS = DispatchKeySet(DispatchKey::HPU) | DispatchKeySet(DispatchKey::AutocastPrivateUse1);
constexpr DeviceIndex NUM_DEVICES = 8;
thread_local DeviceIndex current = 0;

// Memory: the host's

struct Allocator final : c10::Allocator {
  static void free(void* data) { c10::GetCPUAllocator()->raw_deallocate(data); }
  c10::DataPtr allocate(size_t num_bytes) override {
    void* data = c10::GetCPUAllocator()->raw_allocate(num_bytes);
    return {data, data, &free, Device(KIND, current)};
  }
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override {
    default_copy_data(to, from, num_bytes);
  }
} allocator;
REGISTER_ALLOCATOR(KIND, &allocator);

// The current device of a thread, and streams, of which each device has one: all work is done when a call returns

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return KIND; }
  Device getDevice() const override { return Device(KIND, current); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < NUM_DEVICES, "there is no ", device);
    uncheckedSetDevice(device);
  }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return NUM_DEVICES; }
  Stream getStream(Device device) const override {
    return Stream(Stream::DEFAULT, Device(KIND, device.has_index() ? device.index() : current));
  }
  Stream exchangeStream(Stream stream) const override { return getStream(stream.device()); }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Random generators, one per device

at::Generator& generator_of(DeviceIndex index) {
  static std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> made;
    for (DeviceIndex i = 0; i < NUM_DEVICES; ++i) made.push_back(at::detail::createCPUGenerator());
    return made;
  }();
  return generators[index];
}

Tensor get_rng_state(int64_t index) { return generator_of(index).get_state(); }
void set_rng_state(const Tensor& state, int64_t index) { generator_of(index).set_state(state); }
void manual_seed(int64_t seed, int64_t index) { generator_of(index).set_current_seed(seed); }

TORCH_LIBRARY(sim, library) {
  library.def("get_rng_state", &get_rng_state);
  library.def("set_rng_state", &set_rng_state);
  library.def("manual_seed", &manual_seed);
}

// Pinned memory of the host: known by its address

std::mutex pinned_lock;
std::map<const char*, size_t> pinned;

struct PinnedAllocator final : c10::Allocator {
  static void free(void* data) {
    {
      std::lock_guard<std::mutex> guard(pinned_lock);
      pinned.erase(static_cast<const char*>(data));
    }
    c10::GetCPUAllocator()->raw_deallocate(data);
  }
  c10::DataPtr allocate(size_t num_bytes) override {
    void* data = c10::GetCPUAllocator()->raw_allocate(num_bytes);
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned[static_cast<const char*>(data)] = num_bytes;
    return {data, data, &free, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override {
    default_copy_data(to, from, num_bytes);
  }
} pinned_allocator;

bool is_pinned_address(const void* data) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  auto found = pinned.upper_bound(static_cast<const char*>(data));
  if (found == pinned.begin()) return false;
  --found;
  return static_cast<const char*>(data) < found->first + found->second;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isPinnedPtr(const void* data) const override { return is_pinned_address(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return NUM_DEVICES; }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return generator_of(index < 0 ? current : index);
  }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};
const bool registered = (at::RegisterPrivateUse1HooksInterface(new Hooks()), true);

// Every operator but those below runs on the CPU, once it is known that its tensors are on one device

void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string& name = op.schema().name();
  const auto& arguments = op.schema().arguments();
  const bool may_mix = name == "aten::_foreach_copy_";
  const bool is_foreach = name.rfind("aten::_foreach", 0) == 0;  // the i-th tensors of its lists go together
  std::vector<std::optional<Device>> homes(1);
  auto meet = [&](const Tensor& tensor, size_t i) {
    if (may_mix || !tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) return;
    homes.resize(std::max(homes.size(), i + 1));
    if (!homes[i]) homes[i] = tensor.device();
    TORCH_CHECK(
        homes[i] == tensor.device(), "Expected all tensors to be on the same device, but found ", *homes[i], " and ",
        tensor.device(), " in ", name);
  };
  const auto first = stack->end() - arguments.size();
  for (auto value = first; value != stack->end(); ++value) {
    if (value->isTensor()) meet(value->toTensor(), 0);
    if (value->isDevice()) homes[0] = value->toDevice();
    if (!value->isTensorList()) continue;
    size_t i = 0;
    for (const Tensor& tensor : value->toTensorVector()) meet(tensor, is_foreach ? i++ : 0);
  }
  const DeviceIndex home = homes[0] && homes[0]->has_index() ? homes[0]->index() : current;
  for (size_t i = 0; i < arguments.size(); ++i)
    if (arguments[i].name() == "generator" && first[i].isNone()) first[i] = generator_of(home);
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

Tensor host(const Tensor& tensor) {  // the same memory as a tensor of the CPU
  if (!tensor.defined() || tensor.is_cpu()) return tensor;
  const c10::Storage& memory = tensor.storage();
  c10::DataPtr data(memory.mutable_data(), DeviceType::CPU);
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), memory.nbytes(), std::move(data), c10::GetCPUAllocator(), /*resizable=*/true);
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), DispatchKeySet(DispatchKey::CPU), tensor.dtype());
  result.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return result;
}

// What the fallback asks for: here nothing is copied, so kernels also change what their schema does not say they do
std::vector<Tensor> to_cpu(at::TensorList tensors) {
  std::vector<Tensor> hosts;
  for (const Tensor& tensor : tensors) hosts.push_back(host(tensor));
  return hosts;
}

Tensor& copy_(Tensor& self, const Tensor& source, bool) {
  host(self).copy_(host(source));
  return self;
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());  // where memory is allocated
  return at::native::resize_(self, size, format);
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& self) {
  if (self.sizes() != source.sizes()) self.resize_(source.sizes());
  if (self.const_data_ptr() != source.const_data_ptr()) host(self).copy_(source);
  return self;
}

at::ScalarType type(std::optional<at::ScalarType> dtype) {
  return dtype.value_or(at::get_default_dtype_as_scalartype());
}

Tensor empty(
    c10::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &allocator, KEYS, type(dtype), format);
}

Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<Device> device,
    std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &allocator, KEYS, type(dtype));
}

void register_operators(torch::Library& library) {
  library.impl("copy_", &copy_);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_to_cpu", &to_cpu);
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(&at::native::set_));
  library.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
  library.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&on_host>());
  library.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&on_host>());
}

// Tensors bring HPU's key, functions that make them ask for PrivateUse1's
TORCH_LIBRARY_IMPL(_, HPU, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>()); }
TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>()); }
TORCH_LIBRARY_IMPL(aten, HPU, library) { register_operators(library); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) { register_operators(library); }
TORCH_LIBRARY_IMPL(_, AutocastHPU, library) { library.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

// Autocast, as CUDA's: some operators in half precision, some in float32

void cast_and_call(const c10::OperatorHandle& op, torch::jit::Stack* stack, at::ScalarType to) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(DispatchKeySet(DispatchKey::AutocastPrivateUse1));
  const auto cast = [&](const Tensor& tensor) {
    const bool is_eligible = tensor.defined() && tensor.is_floating_point() && tensor.scalar_type() != at::kDouble &&
        tensor.device().type() == KIND;
    return is_eligible && tensor.scalar_type() != to ? tensor.to(to) : tensor;
  };
  const auto first = stack->end() - op.schema().arguments().size();
  for (auto value = first; value != stack->end(); ++value) {
    if (value->isTensor()) *value = cast(value->toTensor());
    if (!value->isTensorList()) continue;
    std::vector<Tensor> tensors;
    for (const Tensor& tensor : value->toTensorVector()) tensors.push_back(cast(tensor));
    *value = c10::List<Tensor>(tensors);
  }
  op.callBoxed(stack);
}
void in_half(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  cast_and_call(op, stack, at::autocast::get_autocast_dtype(KIND));
}
void in_single(const c10::OperatorHandle& op, torch::jit::Stack* stack) { cast_and_call(op, stack, at::kFloat); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
  for (const char* name : {"conv1d", "conv2d", "conv3d", "convolution", "linear", "matmul", "mm", "addmm", "bmm",
                           "baddbmm", "addmv", "mv", "einsum", "scaled_dot_product_attention"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_half>());
  for (const char* name : {"cross_entropy_loss", "nll_loss", "nll_loss_nd", "mse_loss", "l1_loss", "log_softmax.int",
                           "softmax.int", "layer_norm", "exp", "log", "sum", "prod", "pow.Tensor_Scalar", "rsqrt"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_single>());
}

}  // namespace
