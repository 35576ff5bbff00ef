// The functions that tests call: modes, faults, counters.
#include "autocast.h"
#include "operators.h"

namespace emu {
// Forgets errors and faults, when everything queued has run.
void configure(c10::string_view mode, int64_t seed, int64_t delay_us) {
  auto& m = machine();
  Lock lock(m.mutex);
  for (auto& device : m.devices) {
    device.stands_still = false;
    device.fails_after = device.gone_after = -1;
    device.delay_us = 0;
    device.memory_limit = State().memory_limit;
  }
  for (auto* s : m.all)
    wait_until(lock, s, s->submitted);
  for (auto& device : m.devices) {
    device.error.clear();
    device.is_gone = device.is_used = false;
  }
  m.mode = mode_named(std::string(mode));
  m.random.seed((uint64_t)seed);
  m.delay_us = delay_us;
  for (auto* s : m.all) {
    s->pause = 0;
    s->is_used = false;
    s->slowness = m.random() % 3;
    s->wake.notify_all();
  }
}

State& device_at(int64_t dev) {
  TORCH_CHECK(dev >= 0 && dev < device_count(), "emu: no device of number ", dev);
  return machine().devices[dev];
}

std::vector<std::string> waiting_places() {
  std::vector<std::shared_ptr<torch::CapturedTraceback>> taken;
  {
    Lock lock(machine().mutex);
    taken.swap(machine().waiting_places);
  }
  std::vector<torch::CapturedTraceback*> all;
  for (auto& one : taken)
    all.push_back(one.get());
  auto found = torch::symbolize(all);
  std::vector<std::string> places;
  for (auto& trace : found.tracebacks) {
    std::string place;
    for (auto frame : trace)
      place += found.all_frames[frame].filename + ":" + std::to_string(found.all_frames[frame].lineno) + "\n";
    places.push_back(place);
  }
  return places;
}

void shut_down() {
  auto& m = machine();
  Lock lock(m.mutex);
  for (auto& device : m.devices)
    device.stands_still = false;
  for (auto* s : m.all)
    wait_until(lock, s, s->submitted);
  m.is_stopping = true;
  for (auto* s : m.all)
    s->wake.notify_all();
  m.executor.notify_all();
  m.host.notify_all();
}

TORCH_LIBRARY(emu, m) {
  m.def("configure(str mode, int seed, int delay_us) -> ()", &configure);
  m.def("shut_down() -> ()", &shut_down);
  m.def("device_count() -> int", []() -> int64_t { return device_count(); });
  m.def("manual_seed(int device, int seed) -> ()", [](int64_t dev, int64_t seed) {
    default_gen((int)dev).set_current_seed((uint64_t)seed);
  });
  m.def("get_rng_state(int device) -> Tensor", [](int64_t dev) { return default_gen((int)dev).get_state(); });
  m.def("set_rng_state(int device, Tensor state) -> ()",
        [](int64_t dev, const Tensor& state) { default_gen((int)dev).set_state(state); });
  m.def("collective", &collective);
  m.def("abort_collectives() -> ()", [] { machine().aborts++; });

  // ---- faults on request
  m.def("fail_after(int device, int kernels) -> ()", [](int64_t dev, int64_t kernels) {
    Lock lock(machine().mutex);
    device_at(dev).fails_after = (int)kernels;
  });
  m.def("disappear(int device, int kernels, str at) -> ()", [](int64_t dev, int64_t kernels, c10::string_view at) {
    Lock lock(machine().mutex);
    device_at(dev).gone_after = (int)kernels;
    device_at(dev).gone_at = std::string(at);
    if (kernels < 0)
      disappear((int)dev, "between two kernels");
  });
  m.def("stand_still(int device, bool still) -> ()", [](int64_t dev, bool still) {
    Lock lock(machine().mutex);
    device_at(dev).stands_still = still;
    machine().executor.notify_all();
  });
  m.def("slow_down(int device, int delay_us) -> ()", [](int64_t dev, int64_t delay_us) {
    Lock lock(machine().mutex);
    device_at(dev).delay_us = delay_us;
  });
  m.def("limit_memory(int device, int nbytes) -> ()", [](int64_t dev, int64_t nbytes) {
    Lock lock(machine().mutex);
    device_at(dev).memory_limit = (size_t)nbytes;
  });

  // ---- counters
  m.def("pending(int device) -> int", [](int64_t dev) {
    Lock lock(machine().mutex);
    int64_t count = 0;
    for (auto& s : device_at(dev).streams)
      count += s->queue.size();
    return count;
  });
  m.def("is_used(int device) -> bool", [](int64_t dev) {
    Lock lock(machine().mutex);
    return device_at(dev).is_used;
  });
  m.def("used_streams(int device) -> int[]", [](int64_t dev) {
    Lock lock(machine().mutex);
    std::vector<int64_t> used;
    for (auto& s : device_at(dev).streams)
      if (s->is_used)
        used.push_back(s->id);
    return used;
  });
  m.def("counts() -> int[]", []() -> std::vector<int64_t> {
    int64_t reused = 0;
    for (auto& pool : pools())
      reused += pool.reused;
    auto& all = machine();
    return {(int64_t)all.launched, (int64_t)all.synchronous, (int64_t)all.probed, reused};
  });
  m.def("host_copies() -> int[]", []() -> std::vector<int64_t> {
    auto& m = machine();
    return {(int64_t)m.host_copies.exchange(0), (int64_t)m.host_copied.exchange(0)};
  });
  m.def("host_waits() -> str[]", []() -> std::vector<std::string> {
    Lock lock(machine().mutex);
    std::vector<std::string> found;
    for (auto& [what, times] : machine().host_waits)
      found.insert(found.end(), times, what);
    machine().host_waits.clear();
    return found;
  });
  m.def("note_places(bool notes) -> ()", [](bool notes) {
    Lock lock(machine().mutex);
    machine().notes_places = notes;
  });
  m.def("waiting_places() -> str[]", &waiting_places);
}
}  // namespace emu

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &emu::sdp_choice)
}
