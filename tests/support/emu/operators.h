// The ops that are no kernels: new memory, copies, dropout; and collectives of several processes.
#pragma once
#include "fallback.h"

#include <ATen/native/transformers/attention.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace emu {
Tensor empty(c10::SymIntArrayRef size, std::optional<c10::ScalarType> dt, std::optional<c10::Layout>,
             std::optional<Device> dev, std::optional<bool> pin, std::optional<c10::MemoryFormat> mf) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard dg(dev);
  return Tensor(at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), device_allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dt), mf));
}
Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::ScalarType> dt,
                     std::optional<c10::Layout>, std::optional<Device> dev, std::optional<bool>) {
  c10::OptionalDeviceGuard dg(dev);
  return Tensor(at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dt)));
}
void resize_bytes(c10::StorageImpl* st, size_t n) {
  c10::DeviceGuard dg(st->device());
  size_t keep = std::min(n, st->nbytes());
  auto fresh = device_allocator()->allocate(n);
  void *d = fresh.get(), *o = st->mutable_data();
  if (keep && d && o)
    enqueue(current_stream(current_device), "resize", [d, o, keep] { std::memcpy(d, o, keep); });
  st->set_data_ptr_noswap(std::move(fresh)); // the old block is freed in stream order
  st->set_nbytes(n);
}
const Tensor& resize_(const Tensor& t, c10::SymIntArrayRef ssize, std::optional<c10::MemoryFormat> mf) {
  auto size = C10_AS_INTARRAYREF_SLOW(ssize);
  auto* impl = t.unsafeGetTensorImpl();
  if (t.sizes() != size || mf) {
    impl->set_sizes_contiguous(size);
    if (mf && *mf != c10::MemoryFormat::Preserve)
      impl->empty_tensor_restride(*mf);
  }
  size_t need = (t.storage_offset() + t.numel()) * t.itemsize();
  if (t.numel() && need > t.storage().nbytes())
    resize_bytes(t.storage().unsafeGetStorageImpl(), need);
  return t;
}
Tensor& set_storage(Tensor& t, c10::Storage src, c10::SymInt off, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto sz = C10_AS_INTARRAYREF_SLOW(size);
  auto sd = C10_AS_INTARRAYREF_SLOW(stride);
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(src));
  if (sd.data() && (sd.size() == sz.size()))
    impl->set_sizes_and_strides(sz, sd, off.guard_int(__FILE__, __LINE__));
  else {
    impl->set_sizes_contiguous(sz);
    impl->set_storage_offset(off.guard_int(__FILE__, __LINE__));
  }
  return t;
}
Tensor& set_source_storage(Tensor& t, c10::Storage src) {
  int64_t k = src.nbytes() / t.itemsize();
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(src));
  impl->set_sizes_contiguous({k});
  impl->set_storage_offset(0);
  return t;
}
Tensor& set_source_tensor(Tensor& t, const Tensor& src) {
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(src.storage());
  impl->set_sizes_and_strides(src.sizes(), src.strides(), src.storage_offset());
  return t;
}
void record_stream(Tensor& t, c10::Stream s) {
  device_allocator()->recordStream(t.storage().data_ptr(), s);
}
void use_pinned(const Tensor& t, Stream* s) {
  Lock lock(machine().mutex);
  note_use(pinned().find(t.storage().data()), s);
}
Tensor copy_from(const Tensor& src, const Tensor& dst, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (dst.numel() == 0)
    return dst;
  Views v;
  if (on_emu(src) && on_emu(dst)) {
    int i = src.device().index(), j = dst.device().index();
    Stream *a = current_stream(i), *b = current_stream(j);
    Tensor cs = v.view(src), cd = v.view(dst);
    if (i != j) { // runs on the source's stream, between two barriers with the destination's
      uint64_t q = enqueue(b, "p2p ready", [] {});
      make_wait(a, b, q);
    }
    uint64_t q = enqueue(a, "copy_", [cs, cd] { cd.copy_(cs); });
    if (i != j)
      make_wait(b, a, q);
    return dst;
  }
  const bool h2d = on_emu(dst);
  const Tensor &host = h2d ? src : dst, &devt = h2d ? dst : src;
  TORCH_CHECK(host.device().is_cpu(), "emu: copy between emu and ", host.device());
  Stream* s = current_stream(devt.device().index());
  const bool pinned = is_pinned(host.storage().data());
  if (pinned)
    use_pinned(host, s);
  machine().host_copies++;
  machine().host_copied += src.nbytes();
  Tensor cd = v.view(devt), ch;
  if (h2d && non_blocking && !pinned)
    ch = host.clone(); // pageable: staged before the call returns
  else
    ch = v.view(host);
  bool fwd = h2d;
  enqueue(s, h2d ? "copy_ H2D" : "copy_ D2H", [cd, ch, fwd] { fwd ? cd.copy_(ch) : ch.copy_(cd); });
  if (!non_blocking || (!h2d && !pinned))
    synchronize(s, h2d ? "a copy to the device" : "a copy to the host");
  return dst;
}
Tensor copy_from_and_resize(const Tensor& src, const Tensor& dst) {
  if (src.sizes() != dst.sizes())
    dst.resize_(src.sizes());
  return copy_from(src, dst, false);
}
// at::dropout takes a fused path on PrivateUse1; this is what it does on the CPU.
Tensor dropout(const Tensor& x, double p, bool train) {
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
  if (p == 0 || !train || x.numel() == 0)
    return x;
  if (p == 1)
    return x.mul(at::zeros({}, x.options()));
  Tensor noise = at::empty_like(x);
  noise.bernoulli_(1 - p);
  noise.div_(1 - p);
  return x * noise;
}
Tensor& dropout_(Tensor& x, double p, bool train) {
  if (p == 0 || !train || x.numel() == 0)
    return x;
  if (p == 1)
    return x.mul_(at::zeros({}, x.options()));
  Tensor noise = at::empty_like(x);
  noise.bernoulli_(1 - p);
  noise.div_(1 - p);
  return x.mul_(noise);
}
int64_t sdp_choice(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& m, double p,
                   bool causal, std::optional<double> scale, bool gqa) {
  Views w; // the choice the CPU would make; it looks at layouts, not at values
  auto f = [&](const Tensor& t) {
    Tensor r = w.view(t);
    r.set_requires_grad(t.requires_grad());
    return r;
  };
  std::optional<Tensor> mm;
  if (m && m->defined())
    mm = on_emu(*m) ? f(*m) : *m;
  return at::_fused_sdp_choice(f(q), f(k), f(v), mm, p, causal, scale, gqa);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  static const std::set<std::string> own = {
      "empty.memory_format", "empty_strided", "resize_", "set_.source_Storage_storage_offset", "set_.source_Storage",
      "set_.source_Tensor", "record_stream", "_copy_from", "_copy_from_and_resize", "dropout", "dropout_", "copy_"};
  // Where the CPU has a kernel of its own beside a composite one, use the
  // CPU's: otherwise the composite wins over the fallback and the bits differ.
  auto& d = c10::Dispatcher::singleton();
  for (auto& nm : d.getAllOpNames()) {
    if (nm.name.rfind("aten::", 0) != 0)
      continue;
    auto op = d.findOp(nm);
    if (!op || !op->hasSchema() || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1))
      continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) &&
        !op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd))
      continue;
    std::string full = nm.name.substr(6) + (nm.overload_name.empty() ? "" : "." + nm.overload_name);
    if (own.count(full))
      continue;
    m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  for (const char* nm : {"convolution", "convolution_backward"}) // CompositeExplicit, branching on the device
    m.impl(nm, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Storage", TORCH_FN(set_source_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_source_tensor));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("dropout", TORCH_FN(dropout));
  m.impl("dropout_", TORCH_FN(dropout_));
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("dropout", TORCH_FN(dropout));
  m.impl("dropout_", TORCH_FN(dropout_));
}

// Without these the conjugate fallback clones, the clone copies, and so on.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

// A collective through a CPU process group, at its turn in the current stream. As with NCCL, the stream
// stands still when another process is lost, until the group is aborted; then it goes on with any content.
void collective(c10::string_view kind, const c10::intrusive_ptr<c10d::ProcessGroup>& pg, std::vector<Tensor> outs,
                std::vector<Tensor> ins, int64_t arg, std::vector<int64_t> osplit, std::vector<int64_t> isplit) {
  Views v;
  int dev = -1;
  auto conv = [&](std::vector<Tensor>& l) {
    for (auto& t : l) {
      TORCH_CHECK(on_emu(t) && t.is_contiguous(), "emu: collectives take contiguous emu tensors");
      dev = t.device().index();
      t = v.view(t);
    }
  };
  conv(outs);
  conv(ins);
  Stream* s = current_stream(dev < 0 ? current_device : dev);
  auto work = std::make_shared<c10::intrusive_ptr<c10d::Work>>();
  std::string k(kind);
  const uint64_t aborts = machine().aborts;
  auto is_aborted = [aborts] { return machine().aborts != aborts; };
  auto start = [=]() mutable {
    if (is_aborted())
      return;
    if (k == "all_reduce") {
      c10d::AllreduceOptions o;
      o.reduceOp = c10d::ReduceOp((c10d::ReduceOp::RedOpType)arg);
      *work = pg->allreduce(outs, o);
    } else if (k == "broadcast") {
      c10d::BroadcastOptions o;
      o.rootRank = arg;
      *work = pg->broadcast(outs, o);
    } else if (k == "all_gather") {
      *work = pg->_allgather_base(outs[0], ins[0]);
    } else if (k == "all_to_all") {
      *work = pg->alltoall_base(outs[0], ins[0], osplit, isplit);
    } else if (k == "barrier") {
      *work = pg->barrier();
    } else
      TORCH_CHECK(false, "emu: unknown collective ", k);
  };
  enqueue(s, "collective", start);
  Lock lock(machine().mutex);
  Item w;
  w.name = "collective wait";
  w.poll = [work, is_aborted] {
    return !*work || is_aborted() || ((*work)->isCompleted() && !(*work)->exception());
  };
  push(lock, s, std::move(w));
}
}  // namespace emu
