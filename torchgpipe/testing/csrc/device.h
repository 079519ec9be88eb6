// The interfaces that PyTorch asks of an accelerator: devices, streams, events and generators.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include "memory.h"

namespace virtual_accelerator {

inline c10::Device device_at(int index) { return c10::Device(kDeviceType, index); }
inline int index_of(c10::Device d) { return d.has_index() ? checked(d.index()) : thread().device; }
inline c10::Stream stream_at(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, device_at(device), id);
}

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDeviceType; }
  c10::Device getDevice() const override { return device_at(thread().device); }
  void setDevice(c10::Device d) const override { thread().device = index_of(d); }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.has_index()) thread().device = d.index();
  }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto before = getDevice();
    setDevice(d);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return state().devices; }

  c10::Stream getStream(c10::Device d) const override {
    int i = index_of(d);
    return stream_at(i, thread().streams[i]);
  }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream_at(index_of(d), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream getNewStream(c10::Device d, int priority) const override {
    VIRTUAL_LOCK;
    int i = index_of(d);
    return stream_at(i, 1 + (priority ? kPool : state().next_stream[i]++ % kPool));
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto before = getStream(s.device());
    thread().streams[s.device_index()] = s.id();
    return before;
  }
  bool queryStream(const c10::Stream& s) const override {
    synchronizeStream(s);
    return true;
  }
  void synchronizeStream(const c10::Stream& s) const override {
    VIRTUAL_LOCK;
    host_wait(index_of(s));
  }
  void synchronizeDevice(c10::DeviceIndex d) const override {
    VIRTUAL_LOCK;
    for (int i = 0; i < kStreams; i++) host_wait(checked(d) * kStreams + i);
  }
  static int index_of(const c10::Stream& s) { return virtual_accelerator::index_of(s); }
  static int index_of(c10::Device d) { return virtual_accelerator::index_of(d); }

  void record(void** event, const c10::Stream& s, c10::DeviceIndex, c10::EventFlag) const override {
    jitter();
    VIRTUAL_LOCK;
    if (!*event) *event = new Event;
    auto& it = stream_state(index_of(s));
    *static_cast<Event*>(*event) = {it.clock, later(it.time, issued_at())};
  }
  void block(void* event, const c10::Stream& s) const override {
    jitter();
    VIRTUAL_LOCK;
    if (event) wait_for(index_of(s), static_cast<Event*>(event)->clock, static_cast<Event*>(event)->time);
  }
  // All work is done when somebody asks: virtual time does not go on while the host asks again.
  bool queryEvent(void* event) const override {
    synchronizeEvent(event);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    VIRTUAL_LOCK;
    if (event) host_wait(static_cast<Event*>(event)->clock, static_cast<Event*>(event)->time);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    return static_cast<Event*>(b)->time.at - static_cast<Event*>(a)->time.at;
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& s) const override {
    allocator()->recordStream(pointer, s);
  }
};

// A device's generator, which draws the same numbers as a generator of the CPU with the same seed.
struct Generator final : public c10::GeneratorImpl {
  at::Generator cpu = at::detail::createCPUGenerator();
  explicit Generator(int device) : GeneratorImpl(device_at(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "generators of virtual devices have no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "generators of virtual devices have no offset"); }
  void set_state(const c10::TensorImpl& s) override { cpu.unsafeGetGeneratorImpl()->set_state(s); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->cpu = cpu.clone();
    return copy;
  }
};
inline const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* them = new std::vector<at::Generator>;
    for (int i = 0; i < state().devices; i++) them->push_back(at::make_generator<Generator>(i));
    return them;
  }();
  return (*all)[device];
}

// Draw once, as a dry run does for an operator: whoever compares states sees that it draws.
inline void draw(const c10::IValue& value, int device) {
  auto generator = value.isGenerator() ? value.toGenerator() : default_generator(device);
  if (generator.device().type() == kDeviceType) generator = static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->cpu;
  std::lock_guard<std::mutex> lock(generator.mutex());
  at::check_generator<at::CPUGeneratorImpl>(generator)->random();
}

struct Hooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return state().devices; }
  c10::DeviceIndex getCurrentDevice() const override { return thread().device; }
  void setCurrentDevice(c10::DeviceIndex d) const override { thread().device = checked(d); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    auto before = getCurrentDevice();
    setCurrentDevice(d);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override {
    return d < 0 ? getCurrentDevice() : exchangeDevice(d);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override {
    return default_generator(d < 0 ? thread().device : checked(d));
  }
  at::Generator getNewGenerator(c10::DeviceIndex d) const override {
    return at::make_generator<Generator>(d < 0 ? thread().device : checked(d));
  }
  at::Device getDeviceFromPtr(void*) const override { return device_at(thread().device); }
  bool isPinnedPtr(const void* pointer) const override { return PinnedAllocator::contains(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* it = storage.unsafeGetStorageImpl();
    auto fresh = Allocator::allocate_on(it->device().index(), bytes);
    if (fresh.get() && it->data()) allocator()->copy_data(fresh.get(), it->data(), std::min(bytes, it->nbytes()));
    it->set_data_ptr_noswap(std::move(fresh));
    it->set_nbytes(bytes);
  }
};

}  // namespace virtual_accelerator
