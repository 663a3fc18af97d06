// A device whose memory is the host's: tensors on it are apart from those of the CPU for torch, whose CPU kernels
// compute on both.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <cstring>
#include <vector>

using namespace ndtp;

namespace {

const c10::Device kDevice(kType, 0);

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = size ? c10::alloc_cpu(size) : nullptr;
    return {data, data, &c10::free_cpu, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};
Memory memory;
REGISTER_ALLOCATOR(kType, &memory);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream) const override { return getStream(kDevice); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = const_cast<Guard*>(this);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<at::CPUGeneratorImpl>(c10::detail::getNonDeterministicRandom());
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }
  bool isPinnedPtr(const void*) const override { return false; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto data = memory.allocate(size);
    std::memcpy(data.get(), impl->data(), std::min(size, impl->nbytes()));
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(size);
  }
};

at::Tensor bare(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like, int64_t offset) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), offset);
  if (like.is_conj()) made._set_conj(true);
  if (like.is_neg()) made._set_neg(true);
  return made;
}

// A view of a tensor of the device, in the form that the host gave it; in inference mode it is what its base is.
at::Tensor view_of(const at::Tensor& base, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                       base.key_set(), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  made._set_conj(like.is_conj());
  made._set_neg(like.is_neg());
  return made;
}

void keep_storage(void* x) { delete static_cast<c10::Storage*>(x); }

}  // namespace

at::Tensor ndtp::on_host(const at::Tensor& x) {
  auto* storage = x.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  c10::DataPtr data(storage->mutable_data(), new c10::Storage(x.storage()), &keep_storage, c10::Device(c10::kCPU));
  c10::Storage seen(c10::Storage::use_byte_size_t(), storage->nbytes(), std::move(data), c10::GetCPUAllocator(), true);
  return bare(std::move(seen), c10::DispatchKey::CPU, x, x.storage_offset());
}

namespace {

void keep(void* x) { delete static_cast<at::Tensor*>(x); }

c10::Storage storage_of(const at::Tensor& host) {
  auto* storage = host.storage().unsafeGetStorageImpl();
  c10::DataPtr data(storage->mutable_data(), new at::Tensor(host), &keep, kDevice);
  return c10::Storage(c10::Storage::use_byte_size_t(), storage->nbytes(), std::move(data), &memory, true);
}

}  // namespace

at::Tensor ndtp::on_device(const at::Tensor& host) {
  if (!host.defined() || host.layout() != at::kStrided || host.device().type() != c10::kCPU) return host;
  const auto stored = host._is_zerotensor() ? at::zeros(host.sizes(), host.options()) : host;  // zeros without memory
  return bare(storage_of(stored), kKey, stored, stored.storage_offset());
}

namespace {

// One call on the host: the tensors that stand for those of the device.
struct Call {
  std::vector<std::pair<at::Tensor, at::Tensor>> seen;  // of the device, of the host
  bool has_host = false;
  at::Tensor other;

  at::Tensor taken(const at::Tensor& x, bool is_index = false) {
    if (!x.defined()) return x;
    if (!is_ours(x)) {
      if (x.dim() && !is_index && !x.unsafeGetTensorImpl()->is_wrapped_number()) { has_host = true; other = x; }
      return x;
    }
    for (auto& [device, host] : seen)
      if (device.is_same(x)) return host;
    seen.emplace_back(x, on_host(x));
    return seen.back().second;
  }

  // What the kernel has resized, or moved elsewhere.
  void settle() {
    for (auto& [device, host] : seen) {
      auto* impl = device.unsafeGetTensorImpl();
      auto* theirs = host.storage().unsafeGetStorageImpl();
      if (theirs->data() != impl->unsafe_storage().data()) {
        c10::DataPtr data(theirs->mutable_data(), new at::Tensor(host), &keep, kDevice);
        auto* ours = impl->unsafe_storage().unsafeGetStorageImpl();
        ours->set_data_ptr_noswap(std::move(data));
        ours->set_nbytes(theirs->nbytes());
      }
      if (host.sizes() != device.sizes() || host.strides() != device.strides())
        impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }

  at::Tensor given(const at::Tensor& y) {
    if (!y.defined() || y.device().type() != c10::kCPU || y.layout() != at::kStrided) return y;
    for (auto& [device, host] : seen)
      if (host.is_same(y)) return device;
    for (auto& [device, host] : seen)
      if (y.storage().unsafeGetStorageImpl() == host.storage().unsafeGetStorageImpl())
        return view_of(device, y);
    return on_device(y);
  }
};

// Torch takes lengths of the host, which it reads there, and copies between devices.
bool takes_both(const std::string& name) {
  for (const char* known : {"aten::copy_", "aten::_copy_from", "aten::_pack_padded", "aten::_ctc_loss"})
    if (name.rfind(known, 0) == 0) return true;
  return false;
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size(), start = stack->size() - count;
  Call call;
  at::Tensor first;
  for (size_t i = 0; i < count; ++i) {
    auto& value = (*stack)[start + i];
    if (value.isTensor()) {
      if (!first.defined()) first = value.toTensor();
      value = call.taken(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> all;
      for (const at::Tensor& x : value.toTensorVector()) all.push_back(call.taken(x));
      value = c10::IValue(c10::List<at::Tensor>(all));
    } else if (value.isList() && value.toListRef().size() &&
               *value.toList().elementType() == *c10::OptionalType::ofTensor()) {
      c10::List<std::optional<at::Tensor>> all;
      for (const auto& x : value.toListRef())
        all.push_back(x.isNone() ? std::optional<at::Tensor>() : call.taken(x.toTensor(), true));
      value = c10::IValue(std::move(all));
    } else if (value.isDevice() && value.toDevice().type() == kType) {
      value = c10::IValue(c10::Device(c10::kCPU));
    }
  }
  const auto name = toString(op.operator_name());
  if (!call.seen.empty() && call.has_host && !(takes_both(name) && is_ours(first)))
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", kDevice,
                " and cpu! (", name, " takes ", call.other.sizes(), " on the cpu)");
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.settle();
  const auto results = schema.returns().size(), end = stack->size() - results;
  for (size_t i = 0; i < results; ++i) {
    auto& value = (*stack)[end + i];
    if (value.isTensor()) {
      value = call.given(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> all;
      for (const at::Tensor& x : value.toTensorVector()) all.push_back(call.given(x));
      value = c10::IValue(c10::List<at::Tensor>(all));
    }
  }
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, c10::DispatchKeySet(kKey),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
                                           c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  (is_ours(to) ? on_host(to) : to).copy_(is_ours(from) ? on_host(from) : from, non_blocking);
  return to;
}

at::Tensor copy_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Tensor& set_storage(at::Tensor& x, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  auto* impl = x.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.size() == size.size()) {
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  } else {
    impl->set_storage_offset(offset.expect_int());
    impl->set_sizes_contiguous(sizes);
  }
  return x;
}

at::Tensor& set_source(at::Tensor& x, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / x.element_size());
  return set_storage(x, std::move(source), 0, {c10::SymInt(count)}, {});
}

at::Tensor& set_tensor(at::Tensor& x, const at::Tensor& from) {
  TORCH_CHECK(is_ours(from), "set_: a tensor of ", kDevice, " takes no memory of ", from.device());
  auto* impl = x.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(from.storage());
  impl->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
  return x;
}

}  // namespace

void ndtp::start() { at::RegisterPrivateUse1HooksInterface(new Hooks()); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_and_resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_source);
  m.impl("set_.source_Tensor", &set_tensor);
}

// A copy takes conjugates and negatives as they are.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
