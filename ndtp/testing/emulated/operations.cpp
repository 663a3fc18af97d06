// Operations for which torch asks every device for a kernel of its own, and those that autocast knows.
#include "device.h"

#include <ATen/autocast_mode.h>
#include <torch/library.h>

using namespace ndtp;

namespace {

at::Tensor convolution(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                       bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  TORCH_CHECK(is_ours(x) && is_ours(weight), "convolution: all tensors on one device");
  at::NoGradGuard none;
  std::optional<at::Tensor> there;
  if (bias && bias->defined()) there = host_of(*bias);
  return on_device(at::convolution_symint(on_host(x), on_host(weight), there, stride, padding, dilation, transposed,
                                          output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> mask) {
  const c10::SymInt channels = transposed ? weight.sym_size(1) * groups : weight.sym_size(0);
  auto [dx, dw, db] = at::convolution_backward_symint(host_of(grad), host_of(x), host_of(weight), {{channels}}, stride,
                                                      padding, dilation, transposed, output_padding, groups, mask);
  return {on_device(dx), on_device(dw), on_device(db)};
}

at::Tensor biased(const at::Tensor& gates, const std::optional<at::Tensor>& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& of_input, const at::Tensor& of_hidden,
                                                         const at::Tensor& c, const std::optional<at::Tensor>& bias,
                                                         const std::optional<at::Tensor>& other_bias) {
  auto gates = biased(of_input, bias) + biased(of_hidden, other_bias);
  auto each = gates.chunk(4, 1);
  auto kept = each[1].sigmoid() * c + each[0].sigmoid() * each[2].tanh();
  return {each[3].sigmoid() * kept.tanh(), kept, gates};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& of_input, const at::Tensor& of_hidden,
                                            const at::Tensor& hidden, const std::optional<at::Tensor>& bias,
                                            const std::optional<at::Tensor>& other_bias) {
  auto one = biased(of_input, bias), other = biased(of_hidden, other_bias);
  auto i = one.chunk(3, 1), h = other.chunk(3, 1);
  auto fresh = (i[2] + (i[0] + h[0]).sigmoid() * h[2]).tanh();
  return {(hidden - fresh) * (i[1] + h[1]).sigmoid() + fresh, one};
}

// Of integers, which the host's kernel does not take.
at::Tensor histc(const at::Tensor& x, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  return on_device(at::histc(on_host(x).to(at::kDouble), bins, low, high).to(x.scalar_type()));
}

void record_stream(at::Tensor&, c10::Stream) {}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("record_stream", &record_stream);
  m.impl("histc", &histc);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
#undef LOWER
#define FLOAT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(FLOAT)
#undef FLOAT
}
