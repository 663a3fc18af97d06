// A backend of process groups for the emulated device, and the module of Python.
#include "device.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

#include <numeric>

using namespace ndtp;

namespace {

// Collectives of the device: those of a backend of the host, on the same memory.
struct OnHost final : c10d::Backend {
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<Tensors>;
  using Work = c10::intrusive_ptr<c10d::Work>;

  explicit OnHost(c10::intrusive_ptr<c10d::Backend> host)
      : Backend(host->getRank(), host->getSize()), host_(std::move(host)) {}

  const std::string getBackendName() const override { return "emulated"; }

  Tensors on(const Tensors& all) const {
    Tensors made;
    for (const auto& x : all) made.push_back(host_of(x));
    return made;
  }
  Lists on(const Lists& all) const {
    Lists made;
    for (const auto& x : all) made.push_back(on(x));
    return made;
  }

  Work broadcast(Tensors& x, const c10d::BroadcastOptions& options) override {
    auto seen = on(x);
    return host_->broadcast(seen, options);
  }
  Work allreduce(Tensors& x, const c10d::AllreduceOptions& options) override {
    auto seen = on(x);
    return host_->allreduce(seen, options);
  }
  Work allreduce_coalesced(Tensors& x, const c10d::AllreduceCoalescedOptions& options) override {
    auto seen = on(x);
    return host_->allreduce_coalesced(seen, options);
  }
  Work reduce(Tensors& x, const c10d::ReduceOptions& options) override {
    auto seen = on(x);
    return host_->reduce(seen, options);
  }
  Work allgather(Lists& out, Tensors& x, const c10d::AllgatherOptions& options) override {
    auto seen = on(out);
    auto from = on(x);
    return host_->allgather(seen, from, options);
  }
  Work _allgather_base(at::Tensor& out, at::Tensor& x, const c10d::AllgatherOptions& options) override {
    auto seen = host_of(out), from = host_of(x);
    return host_->_allgather_base(seen, from, options);
  }
  Work allgather_into_tensor_coalesced(Tensors& out, Tensors& x, const c10d::AllgatherOptions& options) override {
    auto seen = on(out), from = on(x);
    return host_->allgather_into_tensor_coalesced(seen, from, options);
  }
  Work gather(Lists& out, Tensors& x, const c10d::GatherOptions& options) override {
    auto seen = on(out);
    auto from = on(x);
    return host_->gather(seen, from, options);
  }
  Work scatter(Tensors& out, Lists& x, const c10d::ScatterOptions& options) override {
    auto seen = on(out);
    auto from = on(x);
    return host_->scatter(seen, from, options);
  }
  Work reduce_scatter(Tensors& out, Lists& x, const c10d::ReduceScatterOptions& options) override {
    auto seen = on(out);
    auto from = on(x);
    return host_->reduce_scatter(seen, from, options);
  }
  Work _reduce_scatter_base(at::Tensor& out, at::Tensor& x, const c10d::ReduceScatterOptions& options) override {
    auto seen = host_of(out), from = host_of(x);
    return host_->_reduce_scatter_base(seen, from, options);
  }
  Work reduce_scatter_tensor_coalesced(Tensors& out, Tensors& x, const c10d::ReduceScatterOptions& options) override {
    auto seen = on(out), from = on(x);
    return host_->reduce_scatter_tensor_coalesced(seen, from, options);
  }
  Work alltoall_base(at::Tensor& out, at::Tensor& x, std::vector<int64_t>& to, std::vector<int64_t>& of,
                     const c10d::AllToAllOptions& options) override {
    auto seen = host_of(out), from = host_of(x);
    return host_->alltoall_base(seen, from, to, of, options);
  }
  // The host's backend takes parts of one size here, and of any sizes in one tensor.
  Work alltoall(Tensors& out, Tensors& x, const c10d::AllToAllOptions& options) override {
    std::vector<int64_t> to, of;
    Tensors flat;
    for (const auto& part : out) to.push_back(part.numel());
    for (const auto& part : x) {
      of.push_back(part.numel());
      flat.push_back(host_of(part).reshape(-1));
    }
    auto from = at::cat(flat), landing = at::empty({std::accumulate(to.begin(), to.end(), int64_t{0})}, from.options());
    const auto sizes = to;  // the call takes the other ones
    auto work = host_->alltoall_base(landing, from, to, of, options);
    work->wait();
    auto parts = landing.split_with_sizes(sizes);
    for (size_t i = 0; i < out.size(); ++i) host_of(out[i]).copy_(parts[i].view(out[i].sizes()));
    return work;
  }
  Work send(Tensors& x, int to, int tag) override {
    auto seen = on(x);
    return host_->send(seen, to, tag);
  }
  Work recv(Tensors& x, int from, int tag) override {
    auto seen = on(x);
    return host_->recv(seen, from, tag);
  }
  Work barrier(const c10d::BarrierOptions& options) override { return host_->barrier(options); }

 private:
  c10::intrusive_ptr<c10d::Backend> host_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("start", &start);
  m.def("on_host", [](c10::intrusive_ptr<c10d::Backend> host) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<OnHost>(std::move(host));
  });
}
