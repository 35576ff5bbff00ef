// Every op without a kernel of its own: the CPU's kernel, queued with tensors that own no memory.
#pragma once
#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <set>
#include <sstream>
#include <unordered_map>

namespace emu {
using c10::IValue;

// Tensors over the same memory that do not own it, so that queued work keeps
// nothing alive.
struct Views {
  std::unordered_map<c10::StorageImpl*, c10::Storage> st;
  std::unordered_map<c10::TensorImpl*, Tensor> tt;

  Tensor view(const Tensor& t) {
    auto hit = tt.find(t.unsafeGetTensorImpl());
    if (hit != tt.end())
      return hit->second;
    auto* si = t.storage().unsafeGetStorageImpl();
    auto it = st.find(si);
    if (it == st.end())
      it = st.emplace(si, c10::Storage(c10::Storage::use_byte_size_t(), si->nbytes(),
                                       c10::DataPtr(si->mutable_data(), Device(at::kCPU)), nullptr, false)).first;
    Tensor r = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(it->second), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
    auto* impl = r.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    if (t.unsafeGetTensorImpl()->is_wrapped_number())
      impl->set_wrapped_number(true);
    if (t.is_conj())
      impl->_set_conj(true);
    if (t.is_neg())
      impl->_set_neg(true);
    tt.emplace(t.unsafeGetTensorImpl(), r);
    return r;
  }
};
bool on_emu(const Tensor& t) {
  return t.defined() && t.device().type() == PU1;
}
template <class F>
IValue map_tensors(const IValue& v, F&& f) {
  if (v.isTensor())
    return v.toTensor().defined() ? IValue(f(v.toTensor())) : v;
  if (v.isTensorList()) {
    c10::List<Tensor> l;
    for (const Tensor& t : v.toTensorVector())
      l.push_back(t.defined() ? f(t) : t);
    return l;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> l;
    for (std::optional<Tensor> t : v.toOptionalTensorVector())
      l.push_back(t && t->defined() ? std::optional<Tensor>(f(*t)) : t);
    return l;
  }
  return v;
}
template <class F>
void each_tensor(const IValue& v, F&& f) {
  map_tensors(v, [&](const Tensor& t) { f(t); return t; });
}
Tensor empty_like_cpu(const Tensor& r, int dev) { // an emu tensor with r's layout
  TORCH_CHECK(r.layout() == at::kStrided, "emu: only strided tensors");
  c10::DeviceGuard dg(Device(PU1, (DeviceIndex)dev));
  return Tensor(at::detail::empty_strided_generic(r.sizes(), r.strides(), device_allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), r.scalar_type()));
}

// ---- the fallback
struct Meta { // what a probe learned about one returned tensor
  bool defined = false;
  std::vector<int64_t> sizes, strides;
  c10::ScalarType dt{};
};
struct Probe {
  bool ok = false;
  std::vector<std::vector<Meta>> rets; // per return; a list may hold several
  std::vector<Meta> after; // the tensor arguments afterwards, if any was resized
};
std::mutex probe_m;
std::unordered_map<std::string, Probe> probe_cache;

void key_of(std::ostringstream& o, const IValue& v) {
  if (v.isTensor() || v.isTensorList() || v.isOptionalTensorList()) {
    o << (v.isTensor() ? "T" : "L");
    each_tensor(v, [&](const Tensor& t) {
      o << (int)t.scalar_type() << t.sizes() << t.strides() << on_emu(t) << t.unsafeGetTensorImpl()->is_wrapped_number();
    });
  } else if (v.isGenerator())
    o << "G";
  else
    o << v;
  o << ";";
}
Tensor dummy(const Tensor& t) { // zeros, in the same layout, on the CPU
  if (!on_emu(t))
    return t;
  int64_t span = 1;
  for (int64_t i = 0; i < t.dim(); i++) {
    if (t.size(i) == 0) {
      span = 0;
      break;
    }
    span += (t.size(i) - 1) * t.stride(i);
  }
  Tensor z = at::zeros({span}, at::TensorOptions().dtype(t.scalar_type()).device(at::kCPU));
  return z.as_strided(t.sizes(), t.strides());
}
// Runs the op once on zeros to learn the layout of its results.
Probe probe(const c10::OperatorHandle& op, const std::vector<IValue>& args) {
  std::ostringstream o;
  o << op.operator_name() << "|";
  for (auto& a : args)
    key_of(o, a);
  auto key = o.str();
  {
    std::lock_guard<std::mutex> lk(probe_m);
    auto it = probe_cache.find(key);
    if (it != probe_cache.end())
      return it->second;
  }
  machine().probed++;
  Probe p;
  try {
    std::unordered_map<c10::TensorImpl*, Tensor> memo;
    std::vector<std::pair<Tensor, Tensor>> all;
    torch::jit::Stack st;
    for (auto& a : args) {
      if (a.isGenerator())
        st.push_back(at::detail::createCPUGenerator());
      else if (a.isDevice() && a.toDevice().type() == PU1)
        st.push_back(Device(at::kCPU));
      else
        st.push_back(map_tensors(a, [&](const Tensor& t) {
          auto& m = memo[t.unsafeGetTensorImpl()];
          if (!m.defined()) {
            m = dummy(t);
            all.emplace_back(t, m);
          }
          return m;
        }));
    }
    op.callBoxed(&st);
    for (auto& r : st) {
      std::vector<Meta> ms;
      auto add = [&](const Tensor& t) {
        Meta m;
        TORCH_CHECK(!t.defined() || t.layout() == at::kStrided, "emu: only strided tensors");
        if (t.defined())
          m = Meta{true, t.sizes().vec(), t.strides().vec(), t.scalar_type()};
        ms.push_back(m);
      };
      if (r.isTensor())
        add(r.toTensor());
      else if (r.isTensorList())
        for (const Tensor& t : r.toTensorVector())
          add(t);
      p.rets.push_back(std::move(ms));
    }
    bool resized = false;
    for (auto& [a, b] : all)
      resized = resized || a.sizes() != b.sizes();
    if (resized)
      for (auto& [a, b] : all)
        p.after.push_back(Meta{a.sizes() != b.sizes(), b.sizes().vec(), b.strides().vec(), b.scalar_type()});
    p.ok = true;
  } catch (const std::exception&) {
    p.ok = false;
  }
  std::lock_guard<std::mutex> lk(probe_m);
  probe_cache[key] = p;
  return p;
}

struct DefaultCpuGenSwap { // ops with no Generator argument draw from the default one
  at::CPUGeneratorImpl *d, *e;
  std::unique_lock<std::mutex> lk;
  at::mt19937 keep;
  std::optional<float> kf;
  std::optional<double> kd;
  explicit DefaultCpuGenSwap(const at::Generator& mine)
      : d(at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator())),
        e(at::check_generator<at::CPUGeneratorImpl>(mine)), keep(d->engine()),
        kf(d->next_float_normal_sample()), kd(d->next_double_normal_sample()) {
    d->set_engine(e->engine());
    d->set_next_float_normal_sample(e->next_float_normal_sample());
    d->set_next_double_normal_sample(e->next_double_normal_sample());
  }
  ~DefaultCpuGenSwap() {
    e->set_engine(d->engine());
    e->set_next_float_normal_sample(d->next_float_normal_sample());
    e->set_next_double_normal_sample(d->next_double_normal_sample());
    d->set_engine(keep);
    d->set_next_float_normal_sample(kf);
    d->set_next_double_normal_sample(kd);
  }
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  const auto& schema = op.schema();
  const auto& sargs = schema.arguments();
  const auto& srets = schema.returns();
  const size_t n = sargs.size();
  std::vector<IValue> args(stack->end() - n, stack->end());

  // Which device, what kinds of arguments.
  int dev = -1;
  bool has_gen = false, writes = false, cpu_write = false, reads_tensor = false;
  for (size_t i = 0; i < n; i++) {
    bool w = sargs[i].alias_info() && sargs[i].alias_info()->isWrite();
    writes = writes || w;
    each_tensor(args[i], [&](const Tensor& t) {
      if (on_emu(t)) {
        if (dev < 0)
          dev = t.device().index();
        TORCH_CHECK(dev == t.device().index(), "emu: ", schema.name(),
                    ": expected all tensors on one device, found emu:", dev, " and emu:", (int)t.device().index());
      } else if (w)
        cpu_write = true;
      else
        TORCH_CHECK(t.device().is_cpu(), "emu: tensor on ", t.device());
      if (!w)
        reads_tensor = true;
    });
    if (sargs[i].type()->str().find("Generator") != std::string::npos)
      has_gen = true;
  }
  for (auto& a : args)
    if (a.isDevice() && a.toDevice().type() == PU1 && dev < 0)
      dev = index_of(a.toDevice());
  if (dev < 0)
    dev = current_device;
  c10::DeviceGuard dg(Device(PU1, (DeviceIndex)dev));
  Stream* s = current_stream(dev);
  const char* name = schema.name().c_str();
  // (the CPU's flash attention is tagged for a dropout that it does not have)
  const bool random = (has_gen || op.hasTag(at::Tag::nondeterministic_seeded)) &&
      schema.name().find("flash_attention_for_cpu") == std::string::npos;

  bool is_view = false, fresh = false, other_ret = false;
  for (auto& r : srets) {
    auto k = r.type()->kind();
    bool tensorish = k == c10::TypeKind::TensorType || r.type()->isSubtypeOf(*c10::ListType::ofTensors());
    if (!tensorish)
      other_ret = true;
    else if (!r.alias_info())
      fresh = true;
    else if (!r.alias_info()->isWrite())
      is_view = true;
  }
  auto finish = [&](const std::vector<IValue>& rets) {
    torch::jit::drop(*stack, n);
    for (auto& r : rets)
      stack->push_back(r);
  };
  // The value an aliasing (in-place, out=) return stands for.
  auto aliased = [&](size_t r) -> IValue {
    auto& set = srets[r].alias_info()->beforeSets();
    for (size_t i = 0; i < n; i++)
      if (sargs[i].alias_info() && sargs[i].alias_info()->isWrite() && sargs[i].alias_info()->beforeSets() == set)
        return args[i];
    TORCH_CHECK(false, "emu: no argument for return ", r, " of ", name);
  };
  Views views;
  auto cpu_args = [&](bool snapshot) {
    torch::jit::Stack st;
    for (size_t i = 0; i < n; i++) {
      auto& a = args[i];
      if (a.isGenerator())
        st.push_back(cpu_gen(a.toGenerator()));
      else if (has_gen && a.isNone() && sargs[i].type()->str().find("Generator") != std::string::npos)
        st.push_back(cpu_gen(default_gen(dev)));
      else if (a.isDevice() && a.toDevice().type() == PU1)
        st.push_back(Device(at::kCPU));
      else
        st.push_back(map_tensors(a, [&](const Tensor& t) {
          if (on_emu(t))
            return views.view(t);
          if (!snapshot)
            return t;
          Tensor c = t.clone(); // a host value is read when the op is called
          if (t.unsafeGetTensorImpl()->is_wrapped_number())
            c.unsafeGetTensorImpl()->set_wrapped_number(true);
          return c;
        }));
    }
    return st;
  };

  if (is_view) { // no data moves: run on CPU views now, wrap the results
    auto st = cpu_args(false);
    op.callBoxed(&st);
    auto wrap_view = [&](const Tensor& r) -> Tensor {
      if (!r.defined())
        return r;
      for (auto& a : args) {
        Tensor src;
        each_tensor(a, [&](const Tensor& t) {
          if (on_emu(t) && views.st.count(t.storage().unsafeGetStorageImpl()) &&
              views.st.at(t.storage().unsafeGetStorageImpl()).unsafeGetStorageImpl() == r.storage().unsafeGetStorageImpl())
            src = t;
        });
        if (src.defined()) {
          Tensor v = at::detail::make_tensor<c10::TensorImpl>(
              c10::TensorImpl::VIEW, c10::Storage(src.storage()), src.key_set(), r.dtype());
          v.unsafeGetTensorImpl()->set_sizes_and_strides(r.sizes(), r.strides(), r.storage_offset());
          return v;
        }
      }
      TORCH_CHECK(false, "emu: ", name, " returned no view of its arguments");
    };
    std::vector<IValue> rets;
    for (auto& r : st)
      rets.push_back(map_tensors(r, wrap_view));
    return finish(rets);
  }

  const bool dynamic = op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  bool sync = other_ret || cpu_write || dynamic;

  if (random && !reads_tensor && !fresh && !sync) {
    // Draw now, in host order, into host memory; write in stream order.
    auto st = cpu_args(true);
    std::vector<std::pair<Tensor, Tensor>> moves;
    for (auto& v : st)
      v = map_tensors(v, [&](const Tensor& t) {
        Tensor tmp = at::empty_strided(t.sizes(), t.strides(), t.options());
        moves.emplace_back(t, tmp);
        return tmp;
      });
    {
      std::optional<DefaultCpuGenSwap> sw;
      if (!has_gen)
        sw.emplace(cpu_gen(default_gen(dev)));
      op.callBoxed(&st);
    }
    bool same = true;
    for (auto& [d, t] : moves)
      same = same && d.sizes() == t.sizes();
    TORCH_CHECK(same, "emu: ", name, ": out= of the wrong size");
    enqueue(s, name, [moves] {
      for (auto& [d, t] : moves)
        d.copy_(t);
    });
    machine().launched++;
    std::vector<IValue> rets;
    for (size_t r = 0; r < srets.size(); r++)
      rets.push_back(aliased(r));
    return finish(rets);
  }
  sync = sync || random;

  Probe p;
  if (!sync) {
    bool need = fresh;
    if (!need) // out= tensors that are still empty get resized by the op
      for (size_t i = 0; i < n; i++)
        if (sargs[i].alias_info() && sargs[i].is_out())
          each_tensor(args[i], [&](const Tensor& t) { need = need || t.numel() == 0; });
    if (need) {
      p = probe(op, args);
      sync = !p.ok;
    }
    if (!p.after.empty()) { // resize the out= tensors now, write them in stream order
      size_t k = 0;
      std::set<c10::TensorImpl*> seen;
      for (auto& a : args)
        each_tensor(a, [&](const Tensor& t) {
          if (!seen.insert(t.unsafeGetTensorImpl()).second)
            return;
          auto& m = p.after.at(k++);
          if (m.defined) {
            t.resize_(m.sizes);
            t.unsafeGetTensorImpl()->set_sizes_and_strides(m.sizes, m.strides);
          }
        });
    }
  }
  if (sync) { // the host needs the answer: as on CUDA, wait for this stream only
    machine().synchronous++;
    {
      std::lock_guard<std::mutex> lk(probe_m);
      machine().synchronous_ops[name]++;
    }
    synchronize(s, name);
    auto st = cpu_args(false);
    // out= arguments get scratch tensors so that the op may resize them
    std::vector<std::pair<Tensor, Tensor>> outs;
    for (size_t i = 0; i < n; i++)
      if (sargs[i].alias_info() && sargs[i].is_out())
        st[i] = map_tensors(args[i], [&](const Tensor& t) {
          if (!on_emu(t))
            return t;
          Tensor o = at::empty_strided(t.sizes(), t.strides(), at::TensorOptions().dtype(t.scalar_type()).device(at::kCPU));
          outs.emplace_back(t, o);
          return o;
        });
    {
      std::optional<DefaultCpuGenSwap> sw;
      if (random && !has_gen)
        sw.emplace(cpu_gen(default_gen(dev)));
      op.callBoxed(&st);
    }
    for (auto& [t, o] : outs) {
      if (t.sizes() != o.sizes())
        t.resize_(o.sizes());
      Views v2;
      Tensor d = v2.view(t);
      enqueue(s, name, [d, o = o] { d.copy_(o); });
    }
    std::vector<IValue> rets;
    for (size_t r = 0; r < srets.size(); r++) {
      if (srets[r].alias_info())
        rets.push_back(aliased(r));
      else
        rets.push_back(map_tensors(st[r], [&](const Tensor& t) {
          Tensor e = empty_like_cpu(t, dev);
          Views v2;
          Tensor d = v2.view(e), c = t;
          enqueue(s, name, [d, c] { d.copy_(c); });
          return e;
        }));
    }
    return finish(rets);
  }

  // Asynchronous.
  machine().launched++;
  auto st = std::make_shared<torch::jit::Stack>(cpu_args(true));
  std::vector<IValue> rets;
  std::vector<Tensor> outs; // CPU views of fresh results, in order
  Views v2;
  std::vector<bool> is_fresh;
  for (size_t r = 0; r < srets.size(); r++) {
    is_fresh.push_back(!srets[r].alias_info());
    if (srets[r].alias_info()) {
      rets.push_back(aliased(r));
      continue;
    }
    std::vector<Tensor> es;
    for (auto& m : p.rets.at(r)) {
      Tensor e;
      if (m.defined)
        e = Tensor(at::detail::empty_strided_generic(m.sizes, m.strides, device_allocator(),
            c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), m.dt));
      outs.push_back(m.defined ? v2.view(e) : Tensor());
      es.push_back(e);
    }
    if (srets[r].type()->kind() == c10::TypeKind::TensorType)
      rets.push_back(es[0]);
    else
      rets.push_back(c10::List<Tensor>(c10::ArrayRef<Tensor>(es)));
  }
  enqueue(s, name, [op, st, outs, is_fresh, name] {
    op.callBoxed(st.get());
    size_t k = 0;
    auto put = [&](const Tensor& t) {
      const Tensor& d = outs.at(k++);
      if (!d.defined())
        return;
      TORCH_CHECK(t.sizes() == d.sizes() && t.scalar_type() == d.scalar_type(), "emu: probe of ", name, " was wrong");
      d.copy_(t);
    };
    for (size_t r = 0; r < is_fresh.size(); r++)
      if (is_fresh[r]) {
        auto& v = (*st)[r];
        if (v.isTensor())
          put(v.toTensor());
        else
          for (const Tensor& t : v.toTensorVector())
            put(t);
      }
  });
  finish(rets);
}
}  // namespace emu
