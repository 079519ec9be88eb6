// Virtual accelerators: N devices on the CPU, whose streams are bookkeeping.
//
//   labels.h    which layer and cell a piece of work belongs to
//   clock.h     order and time
//   hollow.h    memory and values of a dry run
//   segments.h  how the caching allocator divides memory
//   memory.h    memory, accesses and races
//   device.h    the interfaces that PyTorch asks of a device
//   roofline.h  how long an operator takes on a described device
//   memo.h      shapes that were computed before
//   wider.h     dtypes that the CPU has no kernels for
//   relabel.h   the fallback, by which most operators are computed
//   kernels.h   the operators that are computed in another way
//   autocast.h  autocast
//
// This file has the functions that Python calls. Loading the library changes nothing until Python
// calls start_devices and start.
#include <future>
#include "autocast.h"
#include "kernels.h"

namespace virtual_accelerator {
namespace {

// ---------------------------------------------------------------- from Python

// Make PyTorch know the devices, and nothing more. Then a first backward starts autograd's threads
// for them.
void start_devices(int64_t devices) {
  VIRTUAL_LOCK;
  auto& s = state();
  s.devices = devices;
  size_t streams = devices * kStreams;
  s.streams.assign(streams, StreamState{VectorClock(streams, 0), {}, 0});
  s.waiting.resize(streams);
  s.host.assign(streams, 0);
  s.next_stream.assign(devices, 0);
  memory().accounts.resize(devices);
  memory().freed.resize(streams);
  new c10::impl::DeviceGuardImplRegistrar(kDeviceType, new Guard);
}
void start() {
  c10::SetAllocator(kDeviceType, allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  auto library = [](const char* name, c10::DispatchKey key) -> torch::Library& {
    return *new torch::Library(torch::Library::IMPL, name, key, __FILE__, __LINE__);
  };
  register_kernels(library("_", c10::DispatchKey::PrivateUse1), library("aten", c10::DispatchKey::PrivateUse1),
                   library("aten", c10::DispatchKey::Conjugate), library("aten", c10::DispatchKey::Negative));
  register_autocast(library("_", c10::DispatchKey::AutocastPrivateUse1),
                    library("aten", c10::DispatchKey::AutocastPrivateUse1));
}

// Wait until autograd's threads have let go of Python's objects, which they do at the end of a
// backward: the process would abort if Python ended meanwhile. A thread that runs another backward
// has finished the one before. A new thread asks for it, which has no Python object to pass on.
void settle() {
  std::async(std::launch::async, [] {
    for (int d = 0; d < state().devices; d++)
      at::ones({}, at::TensorOptions(device_at(d))).set_requires_grad(true).mul(2).backward();
  }).get();
}

void busy(const at::Tensor& t, double cost, std::string name) {
  if (!is_virtual(t)) return;
  jitter();
  auto stack = python_stack();
  VIRTUAL_LOCK;
  int s = current_stream(t.device().index());
  begin(s);
  touch(t, s, false, name, stack);
  spend(s, cost, name);
}

// Begin or end an observation. All work so far is done by then.
void observe(bool begins, int64_t jitter_seed, bool raise, int64_t stack_hook) {
  VIRTUAL_LOCK;
  auto& s = state();
  s.jitter = jitter_seed;
  epoch++;
  observe_labels(begins);
  s.observed = begins;
  s.measured = false;
  s.issue = s.issue_backward = 0;
  if (begins)
    for (auto& waiting : s.waiting) waiting = {};
  for (auto& stream : s.streams) {
    join(s.host, stream.clock);
    stream.time = {};
  }
  s.host_version++;
  s.spans = {};
  s.names.clear();
  s.numbers.clear();
  s.traffic.clear();
  s.costs.clear();
  s.speed = {};
  s.parts.clear();
  s.failures.clear();
  s.too_large.clear();
  memory().large_block = nullptr;
  s.links.clear();
  s.observer = {};
  thread().observer = begins;
  auto& m = memory();
  for (auto& freed : m.freed) freed.clear();
  m.races.clear();
  m.known.clear();
  m.raise = raise;
  m.stack_hook = reinterpret_cast<int64_t (*)()>(stack_hook);
}
void set_cost(std::string op, double cost) {
  VIRTUAL_LOCK;
  state().costs[op] = cost;
}
void set_measured() {
  VIRTUAL_LOCK;
  state().measured = true;
}
void set_issue(double cost, double backward) {
  VIRTUAL_LOCK;
  state().issue = cost;
  state().issue_backward = backward;
}
// The milliseconds in which a device had nothing to do since the host came late: those of its busiest stream.
double late(int64_t device) {
  VIRTUAL_LOCK;
  auto first = state().waiting.begin() + checked(device) * kStreams;
  return std::max_element(first, first + kStreams, [](auto& a, auto& b) { return a.busy < b.busy; })->late;
}
// Describe the links from some devices to others, which share their bandwidth if there are several.
void set_bandwidth(std::vector<int64_t> from, std::vector<int64_t> to, double bytes) {
  VIRTUAL_LOCK;
  Link link{bytes, from.size() * to.size() > 1 ? std::make_shared<std::map<double, double>>() : nullptr};
  for (auto source : from)
    for (auto target : to) state().links[{int(source), int(target)}] = link;
}

// Begin or end a dry run.
void set_hollow(bool on, std::optional<double> value_read) {
  VIRTUAL_LOCK;
  state().hollow = on;
  state().value_read = value_read;
}
// Describe the memory of each device, in bytes: 0 if it has no end and no segments.
void set_capacity(int64_t bytes) {
  VIRTUAL_LOCK;
  memory().capacity = bytes;
  for (auto& account : memory().accounts) account.segments.trim();
}
void set_speed(double bandwidth, double launch, double pageable) {
  VIRTUAL_LOCK;
  auto& speed = state().speed;
  speed.described = true;
  speed.bandwidth = bandwidth;
  speed.launch = launch;
  speed.pageable = pageable;
}
void set_rate(c10::ScalarType type, double rate) {
  VIRTUAL_LOCK;
  state().speed.rates[int8_t(type)] = rate;
}
// Describe the shares of a rate, by the sizes of operators, which ascend.
void set_efficiency(std::string kind, std::vector<double> sizes, std::vector<double> shares) {
  VIRTUAL_LOCK;
  auto& table = state().speed.efficiency[kind];
  table.clear();
  for (size_t i = 0; i < sizes.size(); i++) table.push_back({std::log(sizes[i]), shares[i]});
}

// ---------------------------------------------------------------- to Python, as JSON

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += (unsigned char)c < 32 ? ' ' : c;
  }
  return out + '"';
}
void put(std::ostream& o, const Labels& labels) {
  o << ",\"labels\":[" << labels.own << ',' << labels.node << ']';
}
void put(std::ostream& o, const Access& a) {
  o << "{\"op\":" << quoted(a.op) << ",\"device\":" << a.stream / kStreams << ",\"stream\":" << a.stream % kStreams
    << ",\"write\":" << (a.write ? "true" : "false") << ",\"stack\":" << a.stack;
  put(o, a.labels);
  o << '}';
}
void put(std::ostream& o, const Race& r) {
  o << "{\"kind\":" << quoted(r.kind) << ",\"device\":" << r.device << ",\"bytes\":" << r.bytes << ",\"count\":" << r.count
    << ",\"first\":";
  put(o, r.first);
  o << ",\"second\":";
  put(o, r.second);
  o << '}';
}
void put(std::ostream& o, const Place& p) {
  o << "{\"kind\":" << quoted(p.kind) << ",\"op\":" << quoted(p.op) << ",\"detail\":" << quoted(p.detail)
    << ",\"device\":" << p.stream / kStreams << ",\"bytes\":" << p.bytes;
  put(o, p.labels);
  o << '}';
}
void put(std::ostream& o, const Account::Sample& s) { o << '[' << s.at << ',' << s.bytes << ']'; }
template <class T>
std::string listed(const std::vector<T>& items) {
  std::ostringstream o;
  o.precision(17);
  o << '[';
  for (size_t i = 0; i < items.size(); i++) {
    if (i) o << ',';
    put(o, items[i]);
  }
  o << ']';
  return o.str();
}
// What was too large, and what failed, if anything.
std::string troubles() {
  VIRTUAL_LOCK;
  return "[" + listed(state().too_large) + "," + listed(state().failures) + "]";
}
std::string account(int64_t device) {
  VIRTUAL_LOCK;
  auto& it = memory().accounts[checked(device)];
  return "{\"at_peak\":" + listed(std::vector<Place>{it.at_peak}) + ",\"curve\":" + listed(it.curve) + "}";
}
std::string parts() {
  VIRTUAL_LOCK;
  std::ostringstream o;
  o.precision(17);
  o << '[';
  for (auto& [key, p] : state().parts)
    o << (o.tellp() > 1 ? "," : "") << '[' << std::get<0>(key) << ',' << quoted(std::get<1>(key)) << ','
      << quoted(std::get<2>(key)) << ',' << p.count << ',' << p.flops << ',' << p.bytes << ',' << p.time << ']';
  o << ']';
  return o.str();
}
std::string races() {
  VIRTUAL_LOCK;
  auto all = memory().races;
  // Memory that was freed while in use is a race even before anybody allocates it again.
  for (size_t s = 0; s < memory().freed.size(); s++) {
    std::map<std::tuple<std::string, int, int64_t>, size_t> known;
    for (auto& block : memory().freed[s])
      for (auto& a : block.accesses) {
        if (stream_state(s).clock[a.stream] >= a.clock) continue;
        auto [found, fresh] = known.emplace(std::tuple(a.op, a.stream, a.stack), all.size());
        if (fresh) {
          all.push_back({"memory freed in use", block.device, block.bytes, a, {int(s), 0, 0, 0, true, "free", -1}});
        } else {
          all[found->second].count++;
        }
      }
  }
  return listed(all);
}
// The spans as they lie in memory, and their names.
at::Tensor spans() {
  VIRTUAL_LOCK;
  auto& all = state().spans;
  auto bytes = at::detail::empty_cpu({int64_t(all.size() * sizeof(Span))}, c10::ScalarType::Byte, false, std::nullopt);
  if (!all.empty()) memcpy(bytes.mutable_data_ptr(), all.data(), bytes.nbytes());
  return bytes;
}
std::vector<std::string> names() {
  VIRTUAL_LOCK;
  return state().names;
}
std::vector<int64_t> traffic() {
  VIRTUAL_LOCK;
  std::vector<int64_t> all;
  for (auto& [pair, t] : state().traffic) all.insert(all.end(), {pair.first, pair.second, t.copies, t.bytes});
  return all;
}
double makespan() {
  VIRTUAL_LOCK;
  double last = state().observer.at;
  for (auto& s : state().streams) last = std::max(last, s.time.at);
  return last;
}

at::Generator generator(int64_t device) { return default_generator(checked(device)); }

TORCH_LIBRARY(virtual_accelerator, m) {
  m.def("start_devices(int devices) -> ()", &start_devices);
  m.def("start() -> ()", &start);
  m.def("settle() -> ()", &settle);
  m.def("device_count() -> int", [] { return int64_t(state().devices); });
  m.def("busy(Tensor x, float cost, str name) -> ()");
  m.def("observe(bool begins, int jitter, bool raises, int stack_hook) -> ()", &observe);
  m.def("set_cost(str op, float cost) -> ()", &set_cost);
  m.def("set_measured() -> ()", &set_measured);
  m.def("set_issue(float cost, float backward) -> ()", &set_issue);
  m.def("late(int device) -> float", &late);
  m.def("set_bandwidth(int[] source, int[] target, float bytes) -> ()", &set_bandwidth);
  m.def("set_hollow(bool on, float? value_read) -> ()", &set_hollow);
  m.def("is_hollow() -> bool", [] { return state().hollow.load(); });
  m.def("set_capacity(int bytes) -> ()", &set_capacity);
  m.def("set_speed(float bandwidth, float launch, float pageable) -> ()", &set_speed);
  m.def("set_rate(ScalarType dtype, float rate) -> ()", &set_rate);
  m.def("set_efficiency(str kind, float[] sizes, float[] shares) -> ()", &set_efficiency);
  m.def("troubles() -> str", &troubles);
  m.def("account(int device) -> str", &account);
  m.def("parts() -> str", &parts);
  m.def("pinned() -> int", &PinnedAllocator::bytes);
  m.def("races() -> str", &races);
  m.def("spans() -> Tensor", &spans);
  m.def("names() -> str[]", &names);
  m.def("traffic() -> int[]", &traffic);
  m.def("makespan() -> float", &makespan);
  m.def("label_address() -> int", [] { return reinterpret_cast<int64_t>(&set_label); });
  m.def("generator(int device) -> Generator?", &generator);
}

// For all backends: with a kernel in the definition itself, tracers would see what it calls, which
// is nothing.
TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("_scaled_dot_product_flash_attention", &flash);
  m.impl("_scaled_dot_product_flash_attention_backward", &flash_backward);
}
TORCH_LIBRARY_IMPL(virtual_accelerator, CompositeExplicitAutograd, m) { m.impl("busy", &busy); }

}  // namespace
}  // namespace virtual_accelerator
