// Memory: which operator accessed which bytes, and whether the accesses are ordered.
//
// Each access is compared with the last ones to the same bytes. A read and a write, or two writes,
// are a race if neither is ordered before the other. Freed memory goes back to the stream that it
// was allocated on, as with PyTorch's caching allocators. Allocating it again is an access, too. So
// all other streams' work that used it must be ordered before, or announced by record_stream.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>
#include <cstring>
#include <set>
#include <sstream>
#include "hollow.h"
#include "segments.h"

namespace virtual_accelerator {

struct Access {
  int stream;
  uint32_t clock;
  int64_t low, high;  // Bytes within the block.
  bool write;
  std::string op;
  int64_t stack;  // The number of a Python stack, -1 for none.
  Labels labels;
};
struct Block {
  int device;
  int64_t bytes;
  int stream;  // The stream on which it was allocated.
  std::vector<Access> accesses;
  std::set<int> recorded;   // Streams that record_stream has announced.
  c10::DataPtr cpu_memory;  // The memory, if an operator of the CPU has allocated it, or
  void* memory = nullptr;   // if we have.
  int64_t address = 0;      // In a described device's segments, 0 if none was described.
};
struct Race {
  std::string kind;
  int device;  // The device whose memory it is.
  int64_t bytes;
  Access first, second;
  int64_t count = 1;
};
// Memory that was freed while other streams were using it, and that nobody has allocated again.
struct Freed {
  int device;
  int64_t bytes;
  std::vector<Access> accesses;
};

// A device's memory, as its allocator counts it.
struct Account {
  struct Sample {
    double at;
    int64_t bytes;
  };
  int64_t allocated = 0, peak = 0, reserved_peak = 0;
  Segments segments;
  Place at_peak;
  const Block* peak_block = nullptr;  // What was allocated at the peak, until an operator writes to it.
  std::vector<Sample> curve;  // The most bytes since the sample before.
};

struct Memory {
  std::vector<Account> accounts;
  int64_t capacity = 0;  // Of each device, 0 if none was described.
  const Block* large_block = nullptr;  // What did not fit first in the same way.
  std::vector<std::vector<Freed>> freed;  // By stream.
  std::vector<Race> races;
  std::map<std::string, size_t> known;
  bool raise = false;
  std::atomic<int64_t (*)()> stack_hook{nullptr};
};
inline Memory& memory() {
  static auto* it = new Memory;
  return *it;
}

inline int64_t python_stack() {
  // Call this without the lock, since the hook takes Python's own lock.
  auto hook = memory().stack_hook.load();
  return hook ? hook() : -1;
}
inline std::string name_of(int stream) {
  std::ostringstream o;
  o << "stream " << stream % kStreams << " of virtual:" << stream / kStreams;
  return o.str();
}
inline void report(const char* kind, int device, int64_t bytes, const Access& first, const Access& second) {
  std::ostringstream key;
  key << kind;
  for (auto* a : {&first, &second}) key << ' ' << a->op << ' ' << a->stream << ' ' << a->stack;
  auto [found, fresh] = memory().known.emplace(key.str(), memory().races.size());
  if (!fresh) {
    memory().races[found->second].count++;
  } else {
    memory().races.push_back({kind, device, bytes, first, second});
  }
  TORCH_CHECK(!memory().raise, "race: ", kind, ": ", second.op, " on ", name_of(second.stream),
              " is not ordered after ", first.op, " on ", name_of(first.stream));
}

// PyTorch allocates outputs before it calls the operator that writes them, which is to be told.
inline void name_places(const Block* block, const std::string& op) {
  if (block->device == kHost) return;
  auto& m = memory();
  auto& it = m.accounts[block->device];
  if (it.peak_block == block) it.at_peak.op = op, it.peak_block = nullptr;
  if (m.large_block == block) state().too_large[0].op = op, m.large_block = nullptr;
}

// Note an access by the last work of a stream, and report races.
inline void touch(Block* block, int s, int64_t low, int64_t high, bool write, const std::string& op, int64_t stack) {
  if (!block || high <= low) return;
  if (write) name_places(block, op);
  if (state().hollow) return;  // Nobody looks for races there, and a large step has many accesses.
  auto& clock = state().streams[s].clock;
  Access access{s, clock[s], low, high, write, op, stack, current_labels()};
  auto& all = block->accesses;
  for (auto& a : all)
    if (a.stream != s && (a.write || write) && a.low < high && low < a.high && clock[a.stream] < a.clock)
      report(write ? (a.write ? "write after write" : "write after read") : "read after write",
             block->device, block->bytes, a, access);
  // Some accesses need not be kept. All later work is ordered after the accesses that the host has
  // waited for. And work that is ordered after this access is ordered after those that it replaces.
  auto superseded = [&](const Access& a) {
    if (state().host[a.stream] >= a.clock) return true;
    if (a.low < low || a.high > high) return false;
    return a.stream == s ? write || !a.write : write && clock[a.stream] >= a.clock;
  };
  all.erase(std::remove_if(all.begin(), all.end(), superseded), all.end());
  all.push_back(std::move(access));
}

// How many bytes the allocator takes for a tensor.
inline int64_t counted(const Block& block) { return block.address ? Segments::rounded(block.bytes) : block.bytes; }
inline void sample(Account& it, double at) {
  constexpr size_t kMost = 2048;
  auto& curve = it.curve;
  if (!curve.empty() && at <= curve.back().at) {
    curve.back().bytes = std::max(curve.back().bytes, it.allocated);
  } else {
    curve.push_back({at, it.allocated});
  }
  if (curve.size() < 2 * kMost) return;
  for (size_t i = 0; i < kMost; i++)
    curve[i] = {curve[2 * i].at, std::max(curve[2 * i].bytes, curve[2 * i + 1].bytes)};
  curve.resize(kMost);
}
// Take a block from its device's memory, or give it back.
inline void take(Block& block, const std::string& op) {
  auto& it = memory().accounts[block.device];
  if (auto capacity = memory().capacity) {
    block.address = it.segments.take(block.bytes, block.stream, capacity);
    if (it.segments.reserved > capacity && state().too_large.empty()) {
      note(state().too_large, {"memory", op, "", block.stream, it.allocated + counted(block)});
      memory().large_block = &block;
    }
  }
  it.allocated += counted(block);
  it.reserved_peak = std::max(it.reserved_peak, it.segments.reserved);
  if (it.allocated > it.peak) {
    it.peak = it.allocated;
    if (memory().capacity) {
      it.at_peak = {"peak", op, "", block.stream, it.peak, current_labels()};
      it.peak_block = &block;
    }
  }
  if (memory().capacity) sample(it, state().streams[block.stream].time.at);
}
inline void give(const Block& block) {
  auto& it = memory().accounts[block.device];
  if (it.peak_block == &block) it.peak_block = nullptr;
  if (memory().large_block == &block) memory().large_block = nullptr;
  it.allocated -= counted(block);
  if (block.address) it.segments.give(block.address);
  if (memory().capacity) sample(it, state().streams[block.stream].time.at);
}
// Report memory that was given back to a stream while in use: the stream may now allocate it again.
inline void reuse(int s, const std::string& op, int64_t stack) {
  auto freed = std::move(memory().freed[s]);
  memory().freed[s].clear();
  auto& clock = stream_state(s).clock;
  for (auto& block : freed)
    for (auto& a : block.accesses)
      if (clock[a.stream] < a.clock)
        report("reuse of freed memory", block.device, block.bytes, a,
               {s, clock[s], 0, block.bytes, true, op, stack, current_labels()});
}
inline void free_block(void* context) {
  if (!context) return;
  auto* block = static_cast<Block*>(context);
  {
    VIRTUAL_LOCK;
    // The memory is used again when each stream that was announced has done what it was given by now.
    block->recorded.insert(block->stream);
    auto is_waited_for = [&](const Access& a) {
      for (int s : block->recorded)
        if (stream_state(s).clock[a.stream] >= a.clock) return true;
      return false;
    };
    Freed freed{block->device, block->bytes, {}};
    for (auto& a : block->accesses)
      if (!is_waited_for(a)) freed.accesses.push_back(a);
    if (!freed.accesses.empty()) memory().freed[block->stream].push_back(std::move(freed));
    give(*block);
  }
  free(block->memory);
  delete block;
}
inline c10::DataPtr new_block(int device, int64_t bytes, c10::DataPtr cpu_memory, void* own, const std::string& op, int64_t stack) {
  VIRTUAL_LOCK;
  int s = current_stream(device);
  auto* block = new Block{device, bytes, s, {}, {}, std::move(cpu_memory), own};
  // Earlier work of this stream may still use the memory, and other streams must wait for that work.
  block->accesses.push_back({s, stream_state(s).clock[s], 0, bytes, true, op, stack, current_labels()});
  void* data = state().hollow ? hollow(bytes) : own ? own : block->cpu_memory.get();
  c10::DataPtr pointer(data, block, &free_block, c10::Device(kDeviceType, device));
  take(*block, op);
  reuse(s, op, stack);
  return pointer;
}
inline Block* block_of(const c10::StorageImpl* storage) {
  auto& pointer = const_cast<c10::StorageImpl*>(storage)->_mutable_data_ptr_no_checks();
  return pointer.get_deleter() == &free_block ? static_cast<Block*>(pointer.get_context()) : nullptr;
}

struct Allocator final : public c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override { return allocate_on(thread().device, bytes); }
  static c10::DataPtr allocate_on(int device, size_t bytes) {
    if (bytes == 0) return c10::DataPtr(nullptr, nullptr, &free_block, c10::Device(kDeviceType, device));
    if (state().hollow) return new_block(device, bytes, {}, nullptr, "empty", python_stack());
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 64, bytes) == 0, "out of memory (bytes: ", bytes, ")");
    memset(data, 0xff, bytes);  // NaN, so that reading memory before it is written shows.
    return new_block(device, bytes, {}, data, "empty", python_stack());
  }
  static void record(const c10::StorageImpl* storage, int s) {
    VIRTUAL_LOCK;
    if (auto* block = block_of(storage)) block->recorded.insert(s);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    if (!is_hollow(to) && !is_hollow(from)) memcpy(to, from, bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    VIRTUAL_LOCK;
    for (auto& account : memory().accounts) account.segments.trim();
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream s) override {
    VIRTUAL_LOCK;
    if (pointer.get_deleter() == &free_block && pointer.get_context())
      static_cast<Block*>(pointer.get_context())->recorded.insert(index_of(s));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex d) override {
    VIRTUAL_LOCK;
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& it = memory().accounts[checked(d)];
    for (auto* stat : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*stat)[0].current = it.allocated;
      (*stat)[0].peak = it.peak;
    }
    if (memory().capacity) {
      stats.reserved_bytes[0].current = it.segments.reserved;
      stats.reserved_bytes[0].peak = it.reserved_peak;
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex d) override {
    VIRTUAL_LOCK;
    auto& it = memory().accounts[checked(d)];
    it.peak = it.allocated;
    it.reserved_peak = it.segments.reserved;
    it.at_peak = {};
    it.curve.clear();
  }
};
inline Allocator* allocator() {
  static auto* it = new Allocator;
  return it;
}

// Pinned memory: the host need not wait for copies from and to it. So it is watched as a device's is,
// as far as devices access it.
struct PinnedAllocator final : public c10::Allocator {
  static std::map<char*, Block>& blocks() {
    static auto* it = new std::map<char*, Block>;
    return *it;
  }
  // The block that begins at an address, or that an address is in; null for other memory.
  static Block* find(const void* pointer) {
    auto* p = static_cast<char*>(const_cast<void*>(pointer));
    auto after = blocks().upper_bound(p);
    if (after == blocks().begin()) return nullptr;
    --after;
    return p < after->first + std::max<int64_t>(after->second.bytes, 1) ? &after->second : nullptr;
  }
  static bool contains(const void* pointer) {
    VIRTUAL_LOCK;
    return find(pointer);
  }
  static int64_t bytes() {
    VIRTUAL_LOCK;
    int64_t sum = 0;
    for (auto& [data, block] : blocks()) sum += block.bytes;
    return sum;
  }
  static void release(void* data) {
    VIRTUAL_LOCK;
    blocks().erase(static_cast<char*>(data));
    free(data);
  }
  c10::DataPtr allocate(size_t bytes) override {
    VIRTUAL_LOCK;
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 64, std::max<size_t>(bytes, 1)) == 0, "out of memory (bytes: ", bytes, ")");
    blocks()[static_cast<char*>(data)] = Block{kHost, int64_t(bytes), -1, {}, {}, {}};
    return c10::DataPtr(data, data, &release, c10::Device(c10::kCPU));
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { memcpy(to, from, bytes); }
};
inline PinnedAllocator* pinned_allocator() {
  static auto* it = new PinnedAllocator;
  return it;
}

}  // namespace virtual_accelerator
