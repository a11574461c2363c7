// Simulated devices sim:0, sim:1, ...: tensors of different ones cannot be mixed, nor with the CPU's, and autograd has
// a thread for each, as with several GPUs. Their memory is the host's, and their kernels are the CPU's.
//
// Tensors say they are on PyTorch's PrivateUse1, the device kind for backends outside of it, and are dispatched as
// HPU's, which is a key without kernels in the packages people install: unlike PrivateUse1's, parameters with it stay
// the same objects under Module.to, as on a GPU.

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

using at::Tensor;
using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::DispatchKey, c10::DispatchKeySet, c10::Storage,
    c10::StorageImpl, c10::Stream, c10::TensorImpl;

constexpr DeviceType KIND = DeviceType::PrivateUse1;
constexpr DeviceIndex NUM_DEVICES = 8;
thread_local DeviceIndex current = 0;

// Memory

void release(void* memory) { delete static_cast<Storage*>(memory); }

Storage storage_of(const Storage& memory, Device device, c10::Allocator* allocator) {
  auto* held = new Storage(memory);
  c10::DataPtr data(held->mutable_data(), held, &release, device);
  return c10::make_intrusive<StorageImpl>(
      StorageImpl::use_byte_size_t(), memory.nbytes(), std::move(data), allocator, /*resizable=*/true);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    auto host = c10::make_intrusive<StorageImpl>(
        StorageImpl::use_byte_size_t(), num_bytes, c10::GetCPUAllocator(), /*resizable=*/true);
    auto* held = new Storage(std::move(host));
    return {held->mutable_data(), held, &release, Device(KIND, current)};
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
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return getStream(stream.device()); }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Random generators, one a device

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

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return NUM_DEVICES; }
  DeviceIndex getCurrentDevice() const override { return current; }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return generator_of(index < 0 ? current : index);
  }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};
const bool registered = (at::RegisterPrivateUse1HooksInterface(new Hooks()), true);

// One call of an operator: its tensors as the CPU sees them, and what it returns as a device's

class Call {
 public:
  Call(std::string name, Device device) : device(device), name(std::move(name)) {
    may_mix = name_begins({"aten::index", "aten::_index_put_impl", "aten::_foreach_copy", "copy"});
    is_foreach = name_begins({"aten::_foreach"});
  }

  void on(Device where) { device = where, has_device = true; }

  Tensor to_host(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != KIND) {
      of_host.push_back(tensor);
      return tensor;
    }
    if (!may_mix && !is_foreach && has_device) check(tensor.device());
    if (!has_device) on(tensor.device());
    for (auto& [own, host] : seen)
      if (own.is_same(tensor)) return host;
    auto* key = tensor.storage().unsafeGetStorageImpl();
    if (!hosts.count(key)) {
      hosts.emplace(key, storage_of(tensor.storage(), Device(DeviceType::CPU), c10::GetCPUAllocator()));
      owners.emplace(hosts.at(key).unsafeGetStorageImpl(), tensor.storage());
    }
    DispatchKeySet keys(DispatchKey::CPU);
    for (auto [own, host] : {std::pair(DispatchKey::ADInplaceOrView, DispatchKey::ADInplaceOrView),
                             std::pair(DispatchKey::AutogradHPU, DispatchKey::AutogradCPU)})
      if (tensor.key_set().has(own)) keys = keys.add(host);
    Tensor host = with_shape_of(
        tensor, at::detail::make_tensor<TensorImpl>(TensorImpl::VIEW, Storage(hosts.at(key)), keys, tensor.dtype()));
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) host.unsafeGetTensorImpl()->set_wrapped_number(true);
    seen.emplace_back(tensor, host);
    return host;
  }

  Tensor to_device(const Tensor& host) {
    if (!host.defined() || host.layout() != at::kStrided) return host;
    for (auto& [own, other] : seen)
      if (other.is_same(host)) return own;
    for (auto& tensor : of_host)
      if (tensor.is_same(host)) return host;
    Storage storage = owner_of(host.storage());
    for (auto& [own, _] : seen)
      if (own.storage().is_alias_of(storage) && own.storage().unsafeGetStorageImpl() == storage.unsafeGetStorageImpl())
        return with_shape_of(
            host,
            at::detail::make_tensor<TensorImpl>(TensorImpl::VIEW, std::move(storage), own.key_set(), host.dtype()));
    return with_shape_of(
        host,
        at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::HPU), host.dtype()));
  }

  void check_host() const {
    for (auto& tensor : of_host) TORCH_CHECK(may_mix || !has_device || tensor.dim() == 0, mixed(tensor.device()));
  }

  void check_foreach(const std::vector<std::vector<Tensor>>& lists) const {  // the i-th tensors go together
    for (size_t i = 1; i < lists.size() && !may_mix; ++i)
      for (size_t j = 0; j < std::min(lists[0].size(), lists[i].size()); ++j) {
        const Tensor &first = lists[0][j], &other = lists[i][j];
        TORCH_CHECK(other.device() == first.device() || other.dim() == 0, mixed(other.device()));
      }
  }

  void take_back() {  // the new sizes and memory of what was resized, or set
    for (auto& [own, host] : seen) {
      auto* impl = own.unsafeGetTensorImpl();
      auto owner = owners.find(host.storage().unsafeGetStorageImpl());
      if (owner == owners.end()) {
        impl->set_storage_keep_dtype(owner_of(host.storage()));
      } else if (host.storage().data() != owner->second.data() || host.storage().nbytes() != owner->second.nbytes()) {
        auto* held = new Storage(host.storage());
        auto* storage = owner->second.unsafeGetStorageImpl();
        storage->set_data_ptr_noswap({held->mutable_data(), held, &release, storage->device()});
        storage->set_nbytes(held->nbytes());
      }
      with_shape_of(host, own);
    }
  }

  Device device;
  bool is_foreach;
  std::vector<std::pair<Tensor, Tensor>> seen;  // a device's tensor, and the same one as the CPU's

 private:
  bool name_begins(std::initializer_list<const char*> beginnings) const {
    return std::any_of(beginnings.begin(), beginnings.end(), [&](auto* text) { return name.rfind(text, 0) == 0; });
  }
  std::string mixed(Device other) const {
    return c10::str("Expected all tensors to be on the same device, but found ", device, " and ", other, " in ", name);
  }
  void check(Device other) const { TORCH_CHECK(device == other, mixed(other)); }

  static const Tensor& with_shape_of(const Tensor& model, const Tensor& tensor) {
    auto* impl = tensor.unsafeGetTensorImpl();
    impl->set_storage_offset(model.storage_offset());
    impl->set_sizes_and_strides(model.sizes(), model.strides());
    if (model.is_conj() != tensor.is_conj()) tensor._set_conj(model.is_conj());
    if (model.is_neg() != tensor.is_neg()) tensor._set_neg(model.is_neg());
    return tensor;
  }
  Storage owner_of(const Storage& host) {
    auto owner = owners.find(host.unsafeGetStorageImpl());
    if (owner == owners.end())
      owner = owners.emplace(host.unsafeGetStorageImpl(), storage_of(host, device, &allocator)).first;
    return owner->second;
  }

  std::string name;
  bool has_device = false, may_mix;
  std::unordered_map<StorageImpl*, Storage> hosts, owners;  // a device's storage -> the CPU's, and back
  std::vector<Tensor> of_host;
};

c10::IValue each_tensor(const c10::IValue& value, const std::function<Tensor(const Tensor&)>& function) {
  if (value.isTensor()) return function(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(function(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
      list.push_back(tensor ? std::optional(function(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}

Device here(std::optional<Device> device) {
  return Device(KIND, device && device->has_index() ? device->index() : current);
}

void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {  // every operator but those below
  Call call(op.schema().name(), here(std::nullopt));
  const auto first = stack->end() - op.schema().arguments().size();
  if (call.is_foreach) {
    std::vector<std::vector<Tensor>> lists;
    for (auto value = first; value != stack->end(); ++value)
      if (value->isTensorList()) lists.push_back(value->toTensorVector());
    call.check_foreach(lists);
  }
  for (auto value = first; value != stack->end(); ++value) {
    if (value->isDevice() && value->toDevice().type() == KIND) {
      call.on(here(value->toDevice()));
      *value = Device(DeviceType::CPU);
    } else {
      *value = each_tensor(*value, [&](const Tensor& tensor) { return call.to_host(tensor); });
    }
  }
  call.check_host();
  for (size_t i = 0; i < op.schema().arguments().size(); ++i)
    if (op.schema().arguments()[i].name() == "generator" && first[i].isNone())
      first[i] = generator_of(call.device.index());
  op.callBoxed(stack);
  call.take_back();
  for (auto value = stack->end() - op.schema().returns().size(); value != stack->end(); ++value) {
    size_t i = 0;
    *value = each_tensor(*value, [&](const Tensor& host) {
      if (call.is_foreach && i < call.seen.size()) call.on(call.seen[i++].first.device());
      return call.to_device(host);
    });
  }
}

// Operators that nobody can hand to the CPU as they are

Tensor& copy_(Tensor& self, const Tensor& source, bool /*non_blocking*/) {
  Call call("copy_", self.device());
  Tensor from = call.to_host(source);
  call.to_host(self).copy_(from);
  return self;
}

Tensor copy_from(const Tensor& source, const Tensor& self, bool non_blocking) {
  Tensor to = self;
  return copy_(to, source, non_blocking);
}

at::TensorOptions on_cpu(std::optional<at::ScalarType> dtype) {
  return at::device(at::kCPU).dtype(dtype.value_or(at::get_default_dtype_as_scalartype()));
}

Tensor empty(
    c10::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  return Call("empty", here(device)).to_device(at::empty(size, on_cpu(dtype), format));
}

Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<Device> device,
    std::optional<bool>) {
  return Call("empty_strided", here(device)).to_device(at::empty_strided(size, stride, on_cpu(dtype)));
}

Tensor& set_part(Tensor& self, Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  TORCH_CHECK(self.device() == source.device(), "set_: storage on ", source.device(), ", tensor on ", self.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  stride.size() == size.size() ? impl->set_sizes_and_strides(size, stride) : impl->set_sizes_contiguous(size);
  return self;
}

Tensor& set_all(Tensor& self, Storage source) {
  const int64_t num_elements = source.nbytes() / self.dtype().itemsize();
  return set_part(self, std::move(source), 0, {num_elements}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_part(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor convolution(
    const Tensor& X,
    const Tensor& weight,
    const std::optional<Tensor>& bias,
    c10::IntArrayRef stride,
    c10::IntArrayRef padding,
    c10::IntArrayRef dilation,
    bool transposed,
    c10::IntArrayRef output_padding,
    int64_t groups) {
  Call call("convolution", X.device());
  Tensor images = call.to_host(X), kernel = call.to_host(weight);
  std::optional<Tensor> shift = bias && bias->defined() ? std::optional(call.to_host(*bias)) : std::nullopt;
  call.check_host();
  return call.to_device(
      at::convolution(images, kernel, shift, stride, padding, dilation, transposed, output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad,
    const Tensor& X,
    const Tensor& weight,
    c10::IntArrayRef stride,
    c10::IntArrayRef padding,
    c10::IntArrayRef dilation,
    bool transposed,
    c10::IntArrayRef output_padding,
    int64_t groups,
    std::array<bool, 3> mask) {
  Call call("convolution_backward", X.device());
  Tensor output = call.to_host(grad), images = call.to_host(X), kernel = call.to_host(weight);
  call.check_host();
  const std::vector<int64_t> bias_size = {transposed ? kernel.size(1) * groups : kernel.size(0)};
  auto [images_grad, kernel_grad, bias_grad] = at::convolution_backward(
      output, images, kernel, at::OptionalIntArrayRef(bias_size), stride, padding, dilation, transposed, output_padding,
      groups, mask);
  return {call.to_device(images_grad), call.to_device(kernel_grad), call.to_device(bias_grad)};
}

void register_operators(torch::Library& library) {
  library.impl("copy_", &copy_);
  library.impl("_copy_from", &copy_from);
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("set_.source_Storage_storage_offset", &set_part);
  library.impl("set_.source_Storage", &set_all);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("convolution_overrideable", &convolution);
  library.impl("convolution_backward_overrideable", &convolution_backward);
}

// Tensors bring HPU's key, functions that make them ask for PrivateUse1's
TORCH_LIBRARY_IMPL(_, HPU, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>()); }
TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>()); }
TORCH_LIBRARY_IMPL(aten, HPU, library) { register_operators(library); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) { register_operators(library); }
TORCH_LIBRARY_IMPL(_, AutocastHPU, library) { library.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

}  // namespace

extern "C" {
int num_devices() { return NUM_DEVICES; }
int current_device() { return current; }
void set_device(int index) { current = static_cast<DeviceIndex>(index); }
}
