// Order and time. Streams and events are bookkeeping: operators run at once, in the host's order.
//
// Order: every stream has a vector clock, which says how much of each stream's work is ordered
// before the next work of this stream. An event is a copy of a clock, and a wait takes the maximum
// of two clocks.
// Time: an operator starts when its stream has done the work before, and the thread that issues the
// operator has come to it. It takes the time that the table of costs says. Every point in time
// carries the span of work that ends there.
#pragma once
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>
#include "labels.h"

namespace virtual_accelerator {

constexpr auto kDeviceType = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 64;
constexpr int kPool = 32;            // Streams of a device's pool, as many as on CUDA.
constexpr int kStreams = kPool + 2;  // The default stream, the pool, and one of high priority.
constexpr int kHost = -1;     // Stands for the host where a device is expected.

using VectorClock = std::vector<uint32_t>;

// A point in time, and the span of work that ends there: -1 for none.
struct Time {
  double at = 0;
  int64_t span = -1;
  int64_t since = epoch;  // The observation. An event of an earlier one is long past.
};
inline Time later(Time a, Time b) {
  if (a.since != b.since) return b.since > a.since ? b : a;
  return b.at > a.at ? b : a;
}

struct StreamState {
  VectorClock clock;
  Time time;
  uint64_t host_seen = 0;  // The version of the host's clock that this clock includes.
};
struct Event {
  VectorClock clock;  // Empty until it is recorded.
  Time time;
};
// A large step has very many spans, so each is small, and Python takes them as they are.
struct Span {
  double start, end;
  int64_t after;  // The span whose end let this one start.
  Labels labels;
  int16_t device, stream;
  int32_t name;  // A number in a table.
};
// A link, and the times in which it is taken if several devices share it: the end by the start.
struct Link {
  double bandwidth = 0;  // Bytes per millisecond.
  std::shared_ptr<std::map<double, double>> taken;
};
// The milliseconds in which a stream had nothing to do since the host came late, and those of its work.
struct Waiting {
  double late = 0, busy = 0;
};
struct Traffic {
  int64_t copies = 0, bytes = 0;
};
// How fast a described device is. Times are in milliseconds.
struct Speed {
  bool described = false;
  std::map<int8_t, double> rates;            // Operations per millisecond, by dtype.
  // The share of a rate that a kind of operator reaches, by the logarithm of its size.
  std::map<std::string, std::vector<std::pair<double, double>>> efficiency;
  double bandwidth = 1, launch = 0;          // Bytes per millisecond, and the time of any kernel.
  double pageable = 0;                       // Bytes per millisecond, of a link to memory that is not pinned.
};
// What an operator has taken on a device, in all its calls.
struct Part {
  int64_t count = 0;
  double flops = 0, bytes = 0, time = 0;
};
// A piece of work that could not be done, or that needed more memory than there is.
struct Place {
  std::string kind, op, detail;
  int stream = 0;
  int64_t bytes = 0;
  Labels labels;
};

// The state of the process. It is never destroyed: autograd's threads outlive static objects.
struct State {
  std::recursive_mutex mutex;
  int devices = 0;
  std::vector<StreamState> streams;
  VectorClock host;  // What the host has waited for. All work issued later is ordered after it.
  uint64_t host_version = 1;
  std::vector<Span> spans;
  std::vector<std::string> names;  // Of spans, and the number of each.
  std::unordered_map<std::string, int32_t> numbers;
  std::vector<int> next_stream;
  std::map<std::pair<int, int>, Traffic> traffic;
  // The settings of an observation.
  bool observed = false;
  bool measured = false;  // Whether an operator takes the time that the CPU takes for it.
  double issue = 0;       // Milliseconds that a thread of Python takes to issue a piece of work,
  double issue_backward = 0;  // and those that one of autograd's takes.
  std::vector<Waiting> waiting;  // By stream.
  std::unordered_map<std::string, double> costs;
  std::map<std::pair<int, int>, Link> links;
  std::atomic<int64_t> jitter{-1};                  // A seed, -1 for none.
  Speed speed;
  std::map<std::tuple<int, std::string, std::string>, Part> parts;  // By device, kind and operator.
  std::vector<Place> failures, too_large;           // The last failure, and the first that did not fit.
  std::atomic<bool> hollow{false};                  // Whether operators compute shapes alone,
  std::atomic<bool> was_hollow{false};              // and whether there are hollow tensors.
  std::optional<double> value_read;                 // What a hollow tensor gives to a reader.
  Time observer;                                    // The time up to which the observing thread has waited.
  std::atomic<int> threads{0};
};
inline State& state() {
  static auto* it = new State;
  return *it;
}
#define VIRTUAL_LOCK std::lock_guard<std::recursive_mutex> lock_(state().mutex)
inline int checked(int index) {
  TORCH_CHECK(index >= 0 && index < state().devices, "there is no such virtual device (index: ", index,
              ", devices: ", state().devices, "); load more of them with torchgpipe.testing.load(devices=...)");
  return index;
}

// ---------------------------------------------------------------- threads of the host

struct Thread {
  int device = 0;
  std::vector<int> streams = std::vector<int>(kMaxDevices, 0);  // The current stream of each device.
  int number = state().threads++;
  int64_t epoch = -1;
  bool observer = false;
  Time time;  // The time up to which this thread has waited for devices.
  std::mt19937_64 random;
};
inline Thread& thread() {
  thread_local Thread it;
  if (int64_t now = epoch; it.epoch != now) {
    it.epoch = now;
    it.observer = false;
    it.time = {};
    it.random.seed(state().jitter.load() * 1000003 + it.number);
  }
  return it;
}

// The time at which this thread issues work. The observing thread gives the other threads their
// work, so they issue nothing before its time. Their own waits delay nobody else, since the result
// would then depend on which of the host's threads comes first.
inline Time issued_at() { return later(thread().time, state().observer); }

// Spend the time that the host takes to issue a piece of work.
inline void issue() {
  if (state().issue <= 0 && state().issue_backward <= 0) return;
  // Autograd's own nodes take no Python. A recomputation in backward does, and keeps a graph.
  bool is_backward = !c10::GradMode::is_enabled() && torch::autograd::get_current_node();
  double cost = is_backward ? state().issue_backward : state().issue;
  if (cost <= 0) return;
  auto& t = thread();
  t.time = {issued_at().at + cost, -1};
  if (t.observer) state().observer = later(state().observer, t.time);
}

// Delay this thread at random: mostly not at all, now and then a little, rarely much.
inline void jitter() {
  if (state().jitter < 0) return;
  auto& random = thread().random;
  double x = std::uniform_real_distribution<>(0, 1)(random);
  if (x < 0.005) usleep(1 + random() % 1500);
  else if (x < 0.1) usleep(1 + random() % 100);
}

// ---------------------------------------------------------------- streams

inline int index_of(const c10::Stream& s) { return s.device_index() * kStreams + int(s.id()); }
inline int current_stream(int device) { return device * kStreams + thread().streams[device]; }

inline void join(VectorClock& into, const VectorClock& from) {
  for (size_t i = 0; i < from.size(); i++) into[i] = std::max(into[i], from[i]);
}
inline StreamState& stream_state(int s) {
  auto& it = state().streams[s];
  if (it.host_seen != state().host_version) {
    join(it.clock, state().host);
    it.host_seen = state().host_version;
  }
  return it;
}
// Begin a piece of work on a stream.
inline void begin(int s) {
  issue();
  auto& it = stream_state(s);
  it.clock[s]++;
  Time issued = issued_at();
  if (it.time.since == issued.since && it.time.at > 0) state().waiting[s].late += std::max(0., issued.at - it.time.at);
  it.time = later(it.time, issued);
}
inline void spend(int s, double cost, const std::string& name) {
  if (cost <= 0) return;
  auto& it = state().streams[s];
  state().waiting[s].busy += cost;
  if (state().observed) {
    auto& spans = state().spans;
    auto labels = current_labels();
    // A described device runs so many operators that those of a layer share a span.
    if (state().speed.described && it.time.span >= 0) {
      auto& last = spans[it.time.span];
      if (last.device * kStreams + last.stream == s && last.end == it.time.at && last.labels == labels) {
        it.time.at = last.end += cost;
        return;
      }
    }
    auto [number, fresh] = state().numbers.emplace(name, int32_t(state().names.size()));
    if (fresh) state().names.push_back(name);
    spans.push_back({it.time.at, it.time.at + cost, it.time.span, labels, int16_t(s / kStreams), int16_t(s % kStreams), number->second});
  }
  it.time = {it.time.at + cost, int64_t(state().spans.size()) - 1};
}
// Spend the time of a copy over a link. A link that devices share carries one copy at a time, and a
// copy that begins before another one is done takes the time that is left.
inline void spend_on(Link& link, int s, double cost, const std::string& name) {
  if (cost <= 0 || !link.taken) return spend(s, cost, name);
  auto& taken = *link.taken;
  double& at = state().streams[s].time.at;
  // Rounding leaves gaps, which carry nothing, and bytes, which wait for nothing.
  const double least = cost * 1e-9;
  auto next = taken.upper_bound(at);
  if (next != taken.begin()) at = std::max(at, std::prev(next)->second);
  while (next != taken.end() && next->first - at <= least) at = (next++)->second;
  double end = at;
  for (double left = cost; left > least;) {
    double part = next == taken.end() ? left : std::min(left, next->first - end);
    if (part > least) {
      taken[end] = end + part;
      left -= part;
      end += part;
    }
    if (left > least) end = (next++)->second;
  }
  spend(s, end - at, name);
}
inline void spend_by_table(int s, const std::string& name) {
  if (state().measured || state().speed.described) return;
  auto found = state().costs.find(name.substr(0, name.find_last_not_of('_') + 1));
  if (found != state().costs.end()) spend(s, found->second, name);
}
// Order all later work of a stream after a clock, and after a time.
inline void wait_for(int s, const VectorClock& clock, Time time) {
  auto& it = stream_state(s);
  join(it.clock, clock);
  it.time = later(it.time, time);
}
inline void host_wait(const VectorClock& clock, Time time) {
  join(state().host, clock);
  state().host_version++;
  auto& t = thread();
  t.time = later(t.time, time);
  if (t.observer) state().observer = later(state().observer, t.time);
}
inline void host_wait(int s) {
  auto& it = stream_state(s);
  host_wait(it.clock, it.time);
}

}  // namespace virtual_accelerator
