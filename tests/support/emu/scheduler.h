// Streams as queues of work, and the threads that run it: what makes the device asynchronous.
//
// Device memory is host memory. A kernel is the CPU's kernel, called later, on raw pointers, when its
// stream's turn comes. Nothing queued owns memory: as on a GPU, a freed block may be reused while
// queued work still points at it, and only the order of streams, events and record_stream protect it.
#pragma once
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace emu {
constexpr auto PU1 = c10::DeviceType::PrivateUse1;
using Clock = std::chrono::steady_clock;
using Lock = std::unique_lock<std::mutex>;
using namespace std::chrono_literals;

enum Mode { EAGER, LAZY, RANDOM, THREAD };

struct Stream;
struct Item {
  std::function<void()> run;  // empty: a wait until `other` has passed `seq`, or until `poll` is true
  const char* name = "";
  Stream* other = nullptr;
  uint64_t seq = 0;
  std::function<bool()> poll;  // a collective that runs elsewhere
};

struct Stream {
  int dev = 0;
  int64_t id = 0;
  std::deque<Item> queue;
  uint64_t submitted = 0, done = 0;  // items are numbered from 1 on each stream
  uint64_t pause = 0;                // random mode: turns that it sits out
  bool has_thread = false;
  bool is_used = false;          // since the machine was configured: work was queued, or memory asked for
  int slowness = 1;              // thread mode: 0 never late, 1 sometimes, 2 always
  std::condition_variable wake;  // thread mode: of its thread
  std::vector<Stream*> waiters;  // thread mode: streams whose first item waits for this one
};

struct State {  // of one device
  std::vector<std::unique_ptr<Stream>> streams;
  int next_stream = 1;
  bool is_used = false;     // since the machine was configured, as CUDA's contexts are
  std::string error;        // of a kernel; stays, and every later call on the device fails
  int fails_after = -1;     // a fault on request: kernels until one fails
  int gone_after = -1;      // another: kernels until the device disappears, with what its memory holds,
  std::string gone_at;      // of this name; all if it is empty
  bool is_gone = false;     // it has: even what is only noted by the host fails
  bool stands_still = false;  // another: nothing runs
  int64_t delay_us = 0;       // another: what each kernel takes longer
  size_t memory_limit = size_t(1) << 34;  // bytes
};

inline int64_t setting(const char* name, int64_t fallback) {
  const char* value = std::getenv(name);
  return value && *value ? std::atoll(value) : fallback;
}

inline Mode mode_named(const std::string& name) {
  TORCH_CHECK(name == "eager" || name == "lazy" || name == "random" || name == "thread",
              "emu: no mode ", name, ": give eager, lazy, random or thread");
  return name == "eager" ? EAGER : name == "lazy" ? LAZY : name == "thread" ? THREAD : RANDOM;
}

struct Machine {
  std::mutex mutex;
  std::condition_variable host, executor;
  std::vector<State> devices;
  std::vector<Stream*> all;
  int streams_each;
  int64_t queue_limit, delay_us, idle_ms;
  Mode mode = RANDOM;
  std::mt19937_64 random;
  std::deque<std::pair<Stream*, uint64_t>> demands;
  bool executor_runs = false, is_stopping = false;
  Clock::time_point last_push = Clock::now();
  std::atomic<uint64_t> launched{0}, synchronous{0}, probed{0};
  std::atomic<uint64_t> host_copies{0}, host_copied{0};  // between a device and the host, and their bytes
  std::atomic<uint64_t> aborts{0};  // of all collectives that were queued before
  std::map<std::string, uint64_t> synchronous_ops;
  std::map<std::string, uint64_t> host_waits;  // by what waited
  std::vector<std::shared_ptr<torch::CapturedTraceback>> waiting_places;
  bool notes_places = false;

  Machine() : devices(std::max<int64_t>(1, setting("EMU_DEVICES", 4))) {
    streams_each = (int)setting("EMU_STREAMS", 33);
    queue_limit = setting("EMU_QUEUE", 1024);
    delay_us = setting("EMU_DELAY_US", 100);
    idle_ms = setting("EMU_IDLE_MS", 200);
    for (size_t d = 0; d < devices.size(); d++)
      for (int i = 0; i < streams_each; i++) {
        auto stream = std::make_unique<Stream>();
        stream->dev = (int)d;
        stream->id = i;
        all.push_back(stream.get());
        devices[d].streams.push_back(std::move(stream));
      }
  }
};
inline Machine& machine() {
  static Machine* one = new Machine();  // never destroyed: threads outlive statics
  return *one;
}
inline int device_count() { return (int)machine().devices.size(); }
inline State& device_of(const Stream* s) { return machine().devices[s->dev]; }

// ---- running items: called with the lock held

inline void mark_done(Stream* s) {
  s->done++;
  for (auto* waiting : s->waiters)
    waiting->wake.notify_one();
  s->waiters.clear();
  machine().host.notify_all();
}

void lose_memory(int dev);

// From here on every call on the device fails, and what its memory held is lost.
inline void disappear(int dev, const std::string& when) {
  auto& device = machine().devices[dev];
  device.is_gone = true;
  device.error = "the device has fallen off the bus " + when + ", a fault on request";
  lose_memory(dev);
}

// Runs the first item of a stream, without the lock while it runs. After an error nothing more runs
// on the device.
inline void run_first(Lock& lock, Stream* s) {
  Item item = std::move(s->queue.front());
  s->queue.pop_front();
  auto& device = device_of(s);
  bool counts = device.gone_at.empty() || device.gone_at == item.name;
  if (item.run && counts && device.gone_after >= 0 && device.gone_after-- == 0)
    disappear(s->dev, std::string("in ") + item.name);
  if (item.run && device.error.empty()) {
    bool fails = device.fails_after >= 0 && device.fails_after-- == 0;
    auto delay = std::chrono::microseconds(device.delay_us);
    lock.unlock();
    std::string error;
    if (delay.count())
      std::this_thread::sleep_for(delay);
    try {
      if (fails)
        error = "unspecified launch failure, a fault on request";
      else
        item.run();
    } catch (const std::exception& caught) {  // as CUDA says it of an index that is out of range
      error = "device-side assert triggered, in " + (std::string(item.name) + ": " + caught.what()).substr(0, 600);
    }
    item.run = nullptr;
    lock.lock();
    if (!error.empty() && device.error.empty())
      device.error = error;
  }
  mark_done(s);
}
inline bool can_run(Stream* s) {
  auto& item = s->queue.front();
  if (device_of(s).stands_still)
    return false;
  return item.run || (item.poll ? item.poll() : item.other->done >= item.seq);
}
// Runs a stream up to an item, and what it waits for; false if a device stands still.
inline bool drive(Lock& lock, Stream* s, uint64_t seq) {
  while (s->done < seq) {
    if (device_of(s).stands_still)
      return false;
    if (can_run(s)) {
      run_first(lock, s);
      continue;
    }
    Item& item = s->queue.front();
    if (!item.poll) {
      if (!drive(lock, item.other, item.seq))
        return false;
      continue;
    }
    // Other processes have a part in it: meanwhile this one's other streams go on.
    lock.unlock();
    std::this_thread::sleep_for(100us);
    lock.lock();
    for (auto* other : machine().all)
      if (!other->queue.empty() && can_run(other))
        run_first(lock, other);
  }
  return true;
}

// ---- the threads of the device

inline void compute_as_a_kernel() { at::set_num_threads(1); }

// All modes but "thread": runs what the host waits for, and everything when the host is quiet.
inline void execute() {
  compute_as_a_kernel();
  at::AutoDispatchBelowADInplaceOrView below;
  at::NoGradGuard no_grad;
  auto& m = machine();
  Lock lock(m.mutex);
  while (!m.is_stopping) {
    if (m.demands.empty()) {
      m.executor.wait_for(lock, 20ms);
      bool is_quiet = Clock::now() - m.last_push > std::chrono::milliseconds(m.idle_ms);
      if (m.mode != THREAD && m.demands.empty() && is_quiet)
        for (auto* s : m.all)
          if (!s->queue.empty() && m.demands.empty())
            drive(lock, s, s->submitted);
      continue;
    }
    auto [stream, seq] = m.demands.front();
    m.demands.pop_front();
    if (!drive(lock, stream, seq)) {
      m.demands.emplace_back(stream, seq);
      m.executor.wait_for(lock, 1ms);
    }
  }
}

inline void run_stream(Stream* s) {
  compute_as_a_kernel();
  at::AutoDispatchBelowADInplaceOrView below;
  at::NoGradGuard no_grad;
  auto& m = machine();
  Lock lock(m.mutex);
  while (!m.is_stopping) {
    if (s->queue.empty() || m.mode != THREAD) {
      s->wake.wait(lock);
      continue;
    }
    if (!can_run(s)) {
      if (s->queue.front().poll || device_of(s).stands_still)
        s->wake.wait_for(lock, 1ms);
      else {
        s->queue.front().other->waiters.push_back(s);
        s->wake.wait(lock);
      }
      continue;
    }
    if (s->done % 32 == 0)
      s->slowness = m.random() % 3;
    bool is_late = s->slowness == 2 || (s->slowness == 1 && m.random() % 4 == 0);
    if (m.delay_us > 0 && s->queue.front().run && is_late) {
      auto delay = std::chrono::microseconds(m.random() % (uint64_t)(4 * m.delay_us));
      lock.unlock();
      std::this_thread::sleep_for(delay);
      lock.lock();
    }
    run_first(lock, s);
  }
}

inline void start_executor() {
  if (!machine().executor_runs) {
    machine().executor_runs = true;
    std::thread(execute).detach();
  }
}

// ---- the host's side

// Every call on a device that has failed fails, as after a device-side assert.
inline void refuse_failed(Lock& lock, int dev) {
  auto error = machine().devices[dev].error;
  if (error.empty())
    return;
  lock.unlock();
  throw c10::AcceleratorError(
      {__func__, __FILE__, (uint32_t)__LINE__}, 719,
      "emu:" + std::to_string(dev) + ": " + error + " (reported at a later call)");
}

// What needs no kernel, such as new memory, fails on a device that is gone only.
inline void refuse_gone(Lock& lock, int dev) {
  if (machine().devices[dev].is_gone)
    refuse_failed(lock, dev);
}

// Counts a wait of the host for a device.
inline void note_wait(const char* what) {
  auto& m = machine();
  m.host_waits[what]++;
  if (m.notes_places)
    m.waiting_places.push_back(torch::CapturedTraceback::gather(true, false, false));
}

// Blocks until a stream has passed an item.
inline void wait_until(Lock& lock, Stream* s, uint64_t seq) {
  auto& m = machine();
  if (s->done >= seq)
    return;
  if (m.mode != THREAD) {
    start_executor();
    m.demands.emplace_back(s, seq);
    m.executor.notify_all();
  }
  m.host.wait(lock, [&] { return s->done >= seq; });
}

// Lets a stream run up to an item some time, without waiting for it.
inline void ask_for(Lock& lock, Stream* s, uint64_t seq) {
  auto& m = machine();
  auto demand = std::make_pair(s, seq);
  if (m.mode == THREAD || s->done >= seq || std::find(m.demands.begin(), m.demands.end(), demand) != m.demands.end())
    return;
  start_executor();
  m.demands.push_back(demand);
  m.executor.notify_all();
}

// Random mode: lets a stream advance a little, now and then.
inline void advance_some(Lock& lock) {
  auto& m = machine();
  if (m.mode != RANDOM)
    return;
  auto drawn = m.random();
  if (drawn % 3)
    return;
  std::vector<Stream*> busy;
  for (auto* s : m.all) {
    if (s->pause)
      s->pause--;
    else if (!s->queue.empty() && !device_of(s).stands_still)
      busy.push_back(s);
  }
  if (busy.empty())
    return;
  auto* s = busy[(drawn >> 8) % busy.size()];
  if ((drawn >> 20) % 8 == 0)
    s->pause = (drawn >> 32) % 200;
  else {
    uint64_t seq = std::min(s->submitted, s->done + 1 + (drawn >> 40) % 12);
    start_executor();
    m.demands.emplace_back(s, seq);
    m.executor.notify_all();
    m.host.wait_for(lock, 50ms, [&] { return s->done >= seq; });  // a wait in it may stand still
  }
}

inline uint64_t push(Lock& lock, Stream* s, Item item) {
  auto& m = machine();
  s->is_used = device_of(s).is_used = true;
  s->queue.push_back(std::move(item));
  m.last_push = Clock::now();
  if (m.mode != THREAD)
    start_executor();
  else if (!s->has_thread) {
    s->has_thread = true;
    std::thread(run_stream, s).detach();
  } else
    s->wake.notify_one();
  return ++s->submitted;
}

inline uint64_t enqueue(Stream* s, const char* name, std::function<void()> run) {
  auto& m = machine();
  Lock lock(m.mutex);
  refuse_failed(lock, s->dev);
  uint64_t seq = push(lock, s, Item{std::move(run), name});
  if (m.mode == EAGER)
    wait_until(lock, s, seq);
  else if ((int64_t)s->queue.size() > m.queue_limit)
    wait_until(lock, s, s->done + s->queue.size() / 2);
  else
    advance_some(lock);
  return seq;
}

inline void make_wait(Stream* s, Stream* other, uint64_t seq) {
  Lock lock(machine().mutex);
  for (auto* one : {s, other})
    refuse_gone(lock, one->dev);
  if (s == other || other->done >= seq)
    return;
  push(lock, s, Item{nullptr, "wait", other, seq});
}

inline void synchronize(Stream* s, const char* what) {
  Lock lock(machine().mutex);
  note_wait(what);
  wait_until(lock, s, s->submitted);
  refuse_failed(lock, s->dev);
}

inline void synchronize_device(int dev) {
  Lock lock(machine().mutex);
  note_wait("synchronize");
  for (auto& s : machine().devices[dev].streams)
    wait_until(lock, s.get(), s->submitted);
  refuse_failed(lock, dev);
}

// ---- the current device and streams of a thread

inline thread_local int current_device = 0;
inline thread_local std::vector<Stream*> current_streams;
inline Stream*& current_stream(int dev) {
  TORCH_CHECK(dev >= 0 && dev < device_count(), "emu: no device of number ", dev);
  if (current_streams.empty())
    for (auto& device : machine().devices)
      current_streams.push_back(device.streams[0].get());
  return current_streams[dev];
}
inline int index_of(c10::Device device) { return device.index() < 0 ? current_device : device.index(); }
inline c10::Stream wrap(Stream* s) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(PU1, (c10::DeviceIndex)s->dev), s->id);
}
inline Stream* unwrap(const c10::Stream& s) {
  TORCH_CHECK(s.device_type() == PU1 && s.id() >= 0 && s.id() < machine().streams_each, "emu: no emu stream");
  return machine().devices[index_of(s.device())].streams[s.id()].get();
}
}  // namespace emu
