// Devices, streams and events as torch asks for them; the generators; the hooks of PrivateUse1.
#pragma once
#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace emu {
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;

struct Event {
  Stream* s = nullptr;
  uint64_t seq = 0;
  std::shared_ptr<std::atomic<double>> t;
  bool was_waited_for = false;  // by a program that polls
};
double now_ms() {
  return std::chrono::duration<double, std::milli>(Clock::now().time_since_epoch()).count();
}
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return PU1; }
  Device exchangeDevice(Device d) const override {
    Device old(PU1, (DeviceIndex)current_device);
    setDevice(d);
    return old;
  }
  Device getDevice() const override { return Device(PU1, (DeviceIndex)current_device); }
  void setDevice(Device d) const override {
    if (d.index() < 0)
      return;
    TORCH_CHECK(d.index() < device_count(), "emu: invalid device index ", (int)d.index());
    Lock lock(machine().mutex);
    refuse_gone(lock, d.index());
    current_device = d.index();
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0)
      current_device = d.index();
  }
  c10::Stream getStream(Device d) const override { return wrap(current_stream(index_of(d))); }
  c10::Stream getDefaultStream(Device d) const override { return wrap(machine().devices[index_of(d)].streams[0].get()); }
  c10::Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream getNewStream(Device d, int) const override {
    Lock lock(machine().mutex);
    refuse_gone(lock, index_of(d));
    auto& device = machine().devices[index_of(d)];
    device.is_used = true;
    int number = device.next_stream;
    device.next_stream = number + 1 < machine().streams_each ? number + 1 : 1;
    return wrap(device.streams[number].get());
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto*& c = current_stream(index_of(s.device()));
    auto old = wrap(c);
    c = unwrap(s);
    return old;
  }
  void* getStreamNativeHandle(const c10::Stream s) const override { return unwrap(s); }
  void destroyEvent(void* e, const DeviceIndex) const noexcept override { delete (Event*)e; }
  void record(void** e, const c10::Stream& st, const DeviceIndex d, const c10::EventFlag) const override {
    TORCH_CHECK(d < 0 || d == st.device_index(), "emu: event of device ", (int)d,
                " recorded on a stream of device ", (int)st.device_index());
    if (!*e)
      *e = new Event();
    auto* ev = (Event*)*e;
    auto* s = unwrap(st);
    auto t = std::make_shared<std::atomic<double>>(0.0);
    uint64_t seq = enqueue(s, "event", [t] { t->store(now_ms()); });
    Lock lock(machine().mutex);
    *ev = Event{s, seq, t};
  }
  void block(void* e, const c10::Stream& st) const override {
    auto* ev = (Event*)e;
    if (ev && ev->s)
      make_wait(unwrap(st), ev->s, ev->seq);
  }
  // Asks for the work in front of the event, so that a program that polls gets its answer in every mode.
  bool queryEvent(void* e) const override {
    auto* ev = (Event*)e;
    if (!ev || !ev->s)
      return true;
    Lock lock(machine().mutex);
    ask_for(lock, ev->s, ev->seq);
    refuse_failed(lock, ev->s->dev);
    bool is_over = ev->s->done >= ev->seq;
    if (!is_over && !std::exchange(ev->was_waited_for, true))
      note_wait("an event, by polling");
    return is_over;
  }
  DeviceIndex deviceCount() const noexcept override { return (DeviceIndex)device_count(); }
  bool queryStream(const c10::Stream& st) const override {
    auto* s = unwrap(st);
    Lock lock(machine().mutex);
    ask_for(lock, s, s->submitted);
    refuse_failed(lock, s->dev);
    return s->done >= s->submitted;
  }
  void synchronizeStream(const c10::Stream& st) const override { synchronize(unwrap(st), "a stream"); }
  void synchronizeEvent(void* e) const override {
    auto* ev = (Event*)e;
    if (!ev || !ev->s)
      return;
    Lock lock(machine().mutex);
    note_wait("an event");
    wait_until(lock, ev->s, ev->seq);
    refuse_failed(lock, ev->s->dev);
  }
  void synchronizeDevice(const DeviceIndex d) const override { synchronize_device(d < 0 ? current_device : d); }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override {
    device_allocator()->recordStream(p, s);
  }
  double elapsedTime(void* a, void* b, const DeviceIndex) const override {
    auto *x = (Event*)a, *y = (Event*)b;
    TORCH_CHECK(x && y && x->t && y->t, "emu: both events must be recorded");
    TORCH_CHECK(x->t->load() != 0 && y->t->load() != 0, "emu: both events must be completed");
    return y->t->load() - x->t->load();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- generators
struct EmuGenerator final : c10::GeneratorImpl {
  at::Generator cpu;
  explicit EmuGenerator(DeviceIndex d, at::Generator c = at::detail::createCPUGenerator())
      : GeneratorImpl(Device(PU1, d), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), cpu(std::move(c)) {}
  void set_current_seed(uint64_t s) override { cpu.set_current_seed(s); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "emu: generators have no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "emu: generators have no offset"); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& s) override { cpu.unsafeGetGeneratorImpl()->set_state(s); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  EmuGenerator* clone_impl() const override { return new EmuGenerator(device_.index(), cpu.clone()); }
};
at::Generator& default_gen(int d) {
  static auto* v = [] {
    auto* v = new std::vector<at::Generator>();
    for (int i = 0; i < device_count(); i++)
      v->push_back(at::make_generator<EmuGenerator>((DeviceIndex)i));
    return v;
  }();
  return (*v)[d < 0 ? current_device : d];
}
at::Generator cpu_gen(const at::Generator& g) {
  return g.device().is_cpu() ? g : static_cast<EmuGenerator*>(g.unsafeGetGeneratorImpl())->cpu;
}

// ---- hooks
void resize_bytes(c10::StorageImpl* st, size_t n);
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return (DeviceIndex)device_count(); }
  void setCurrentDevice(DeviceIndex d) const override { Guard().setDevice(Device(PU1, d)); }
  DeviceIndex getCurrentDevice() const override { return (DeviceIndex)current_device; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return Guard().exchangeDevice(Device(PU1, d)).index(); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  Device getDeviceFromPtr(void* p) const override {
    Lock lock(machine().mutex);
    for (int d = 0; d < device_count(); d++)
      if (pools()[d].find(p))
        return Device(PU1, (DeviceIndex)d);
    TORCH_CHECK(false, "emu: not a device pointer");
  }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override { return default_gen(d); }
  at::Generator getNewGenerator(DeviceIndex d) const override {
    return at::make_generator<EmuGenerator>((DeviceIndex)(d < 0 ? current_device : d));
  }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    resize_bytes(s.unsafeGetStorageImpl(), n);
  }
};
struct RegisterHooks {
  RegisterHooks() { at::RegisterPrivateUse1HooksInterface(new Hooks()); }
} register_hooks;
}  // namespace emu
