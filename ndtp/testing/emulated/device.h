// What the parts of the emulated device share.
#pragma once

#include <ATen/ATen.h>

namespace ndtp {

constexpr auto kKey = c10::DispatchKey::PrivateUse1;
constexpr auto kType = c10::DeviceType::PrivateUse1;

inline bool is_ours(const at::Tensor& x) { return x.defined() && x.device().type() == kType; }

// Let torch know the device.
void start();

// The same memory, which it holds, as a tensor of the CPU, which CPU kernels may resize.
at::Tensor on_host(const at::Tensor& x);

// The same memory as a tensor of the device.
at::Tensor on_device(const at::Tensor& host);

inline at::Tensor host_of(const at::Tensor& x) { return is_ours(x) ? on_host(x) : x; }

}  // namespace ndtp
