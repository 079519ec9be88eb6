// Hollow memory: that of a dry run, in which tensors have sizes and addresses, and no bytes.
//
// All addresses lie in one range that nobody can read or write. So it shows when a kernel takes a
// hollow tensor for a real one.
#pragma once
#include <c10/core/Storage.h>
#include <sys/mman.h>
#include "clock.h"

namespace virtual_accelerator {

constexpr size_t kRoom = 1ull << 45;
inline char* room() {
  static auto* it = [] {
    void* found = mmap(nullptr, kRoom, PROT_NONE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(found != MAP_FAILED, "a dry run takes 32 TiB of addresses, and no memory (limit: ulimit -v); raise it");
    state().was_hollow = true;
    return static_cast<char*>(found);
  }();
  return it;
}
// An address of so many bytes. Addresses come again when the range has been used up.
inline void* hollow(size_t bytes) {
  static size_t next = 0;
  VIRTUAL_LOCK;
  bytes = (bytes + 511) / 512 * 512;
  if (next + bytes > kRoom) next = 0;
  next += bytes;
  return room() + next - bytes;
}
inline bool is_hollow(const void* pointer) {
  auto* p = static_cast<const char*>(pointer);
  return state().was_hollow && p >= room() && p < room() + kRoom;
}

// The device that computes: the CPU, or the one that knows shapes alone.
inline c10::DeviceType inner_device() { return state().hollow ? c10::kMeta : c10::kCPU; }
inline c10::DispatchKey inner_key() { return state().hollow ? c10::DispatchKey::Meta : c10::DispatchKey::CPU; }

// Note a piece of work that cannot be done, so that its layer can be told.
inline void note(std::vector<Place>& places, Place place) {
  VIRTUAL_LOCK;
  place.labels = current_labels();
  places.assign(1, std::move(place));
}
inline void fail(const char* kind, const std::string& op, const std::string& rule, const char* remedy) {
  note(state().failures, {kind, op, rule + "; " + remedy});
  TORCH_CHECK(false, rule, " (operator: ", op, "); ", remedy);
}
// Refuse to read a value, unless there is one that stands for all.
inline double value_of_hollow(const std::string& op) {
  if (!state().value_read)
    fail("value", op, "a dry run computes no values, and so none can be read",
         "leave it out of the step, or pass value_read=0.0 for what every read gives");
  return *state().value_read;
}

}  // namespace virtual_accelerator
