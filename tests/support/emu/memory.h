// Memory: a caching allocator for each device and stream, and one for pinned memory of the host.
//
// A freed block goes to the next request of its stream at once, filled with NaN in the stream's order.
// So work on another stream that still reads it, without record_stream, gets NaN.
#pragma once
#include "scheduler.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <cstring>
#include <list>

namespace emu {
struct Block {
  void* start;
  size_t size;
  Stream* home;  // null: pinned memory
  std::vector<Stream*> users;
};
using Marks = std::vector<std::pair<Stream*, uint64_t>>;

constexpr size_t LINE = 512;
constexpr int FILL = 0xFF;  // NaN in every floating-point type

struct Pool {  // of one device, or of pinned memory; used with the machine's lock held
  std::map<Stream*, std::multimap<size_t, Block*>> free;
  std::list<std::pair<Block*, Marks>> deferred;  // freed, while streams may still use them
  std::map<void*, Block*> live;
  int64_t in_use = 0, peak = 0, reserved = 0, reused = 0;

  void settle() {
    for (auto it = deferred.begin(); it != deferred.end();) {
      bool is_over = true;
      for (auto& [stream, seq] : it->second)
        is_over = is_over && stream->done >= seq && !device_of(stream).is_gone;
      if (!is_over) {
        ++it;
        continue;
      }
      Block* block = it->first;
      auto& ready = free[block->home];
      ready.insert(ready.lower_bound(block->size), {block->size, block});  // last in, first out
      it = deferred.erase(it);
    }
  }

  void* get(Lock& lock, size_t nbytes, Stream* home, size_t limit) {
    size_t size = (nbytes + LINE - 1) / LINE * LINE;
    settle();
    TORCH_CHECK_WITH(OutOfMemoryError, in_use + size <= limit, "emu out of memory: tried to allocate ",
                     size, " bytes, ", in_use, " of ", limit, " are in use");
    auto& ready = free[home];
    auto found = ready.lower_bound(size);
    Block* block;
    if (found != ready.end() && found->first <= 2 * size + 2048) {
      block = found->second;
      ready.erase(found);
      reused++;
      if (home)  // earlier work of this stream may still use it
        push(lock, home, Item{[p = block->start, n = block->size] { std::memset(p, FILL, n); }, "fill"});
      else
        std::memset(block->start, FILL, block->size);
    } else {
      block = new Block{std::aligned_alloc(LINE, size), size, home, {}};
      TORCH_CHECK(block->start, "emu: the machine is out of memory");
      std::memset(block->start, FILL, size);
      reserved += size;
    }
    live[block->start] = block;
    in_use += block->size;
    peak = std::max(peak, in_use);
    return block->start;
  }

  void put(void* start) {
    auto it = live.find(start);
    if (it == live.end())
      return;
    Block* block = it->second;
    live.erase(it);
    in_use -= block->size;
    Marks marks;
    for (auto* stream : block->users)
      marks.emplace_back(stream, stream->submitted);
    block->users.clear();
    deferred.emplace_back(block, std::move(marks));
    settle();
  }

  Block* find(const void* place) {
    auto it = live.upper_bound(const_cast<void*>(place));
    if (it == live.begin())
      return nullptr;
    --it;
    return (const char*)place < (char*)it->first + it->second->size ? it->second : nullptr;
  }

  void trim() {
    settle();
    for (auto& [stream, ready] : free) {
      for (auto& [size, block] : ready) {
        reserved -= size;
        std::free(block->start);
        delete block;
      }
      ready.clear();
    }
  }
};
inline std::vector<Pool>& pools() {  // by device; behind them, that of pinned memory
  static auto* all = new std::vector<Pool>(device_count() + 1);
  return *all;
}
inline Pool& pinned() { return pools().back(); }
inline void note_use(Block* block, Stream* s) {
  if (block && s != block->home && std::find(block->users.begin(), block->users.end(), s) == block->users.end())
    block->users.push_back(s);
}
inline void free_on_device(void* start) {
  Lock lock(machine().mutex);
  for (int d = 0; d < device_count(); d++)
    if (!machine().devices[d].is_gone)  // where it fails: the memory is never used again
      pools()[d].put(start);
}
inline void lose_memory(int dev) {
  for (auto& [start, block] : pools()[dev].live)
    std::memset(start, FILL, block->size);
}
inline void free_pinned(void* start) {
  Lock lock(machine().mutex);
  pinned().put(start);
}
// As CUDA's allocator of pinned memory: the first request after a device has failed that a freed block
// was for raises the device's error, whoever asks for memory.
inline void refuse_failed_users(Lock& lock) {
  for (auto& [block, marks] : pinned().deferred)
    for (auto mark = marks.begin(); mark != marks.end(); ++mark)
      if (int dev = mark->first->dev; !machine().devices[dev].error.empty()) {
        marks.erase(mark);
        refuse_failed(lock, dev);
      }
}
inline bool is_pinned(const void* place) {
  Lock lock(machine().mutex);
  return pinned().find(place) != nullptr;
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    int dev = current_device;
    Stream* stream = current_stream(dev);
    c10::Device device(PU1, (c10::DeviceIndex)dev);
    if (!nbytes)
      return {nullptr, nullptr, &free_on_device, device};
    Lock lock(machine().mutex);
    refuse_gone(lock, dev);
    stream->is_used = device_of(stream).is_used = true;
    void* start = pools()[dev].get(lock, nbytes, stream, machine().devices[dev].memory_limit);
    return {start, start, &free_on_device, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_on_device; }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    enqueue(current_stream(current_device), "copy_data", [=] { std::memcpy(to, from, nbytes); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (int d = 0; d < device_count(); d++)
      if (!machine().devices[d].is_gone)
        synchronize_device(d);
    Lock lock(machine().mutex);
    for (int d = 0; d < device_count(); d++)
      pools()[d].trim();
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (!data.get())
      return;
    Stream* user = unwrap(stream);
    Lock lock(machine().mutex);
    refuse_gone(lock, index_of(data.device()));
    note_use(pools()[index_of(data.device())].find(data.get()), user);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex d) override {
    Lock lock(machine().mutex);
    auto& pool = pools()[d];
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* one : {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*one)[0].current = pool.in_use;
      (*one)[0].peak = pool.peak;
    }
    stats.reserved_bytes[0].current = stats.reserved_bytes[0].peak = pool.reserved;
    stats.allocation[0].current = pool.live.size();
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex d) override {
    Lock lock(machine().mutex);
    pools()[d].peak = pools()[d].in_use;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex d) override {
    Lock lock(machine().mutex);
    refuse_gone(lock, d);
    size_t total = machine().devices[d].memory_limit;
    return {total - pools()[d].in_use, total};
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (!nbytes)
      return {nullptr, nullptr, &free_pinned, c10::Device(at::kCPU)};
    Lock lock(machine().mutex);
    refuse_failed_users(lock);
    auto& all = machine().devices;
    if (std::none_of(all.begin(), all.end(), [](State& device) { return device.is_used; }))
      all[current_device].is_used = true;  // CUDA starts there, unless it has started elsewhere
    void* start = pinned().get(lock, nbytes, nullptr, SIZE_MAX);
    return {start, start, &free_pinned, c10::Device(at::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
};
inline DeviceAllocator* device_allocator() {
  static auto* one = new DeviceAllocator();
  return one;
}
inline PinnedAllocator* pinned_allocator() {
  static auto* one = new PinnedAllocator();
  return one;
}
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, device_allocator())
}  // namespace emu
