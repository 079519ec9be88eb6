// Memory of shapes: what the meta kernel of an operator has said of its results.
//
// Many meta kernels are written in Python and take a millisecond or more; a step asks the same again
// for each micro-batch. Entries are never taken away, so readers need not hold the lock.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <shared_mutex>
#include "roofline.h"

namespace virtual_accelerator {

struct Result {
  int argument = -1;  // The tensor among the arguments that it is, or
  std::vector<int64_t> sizes, strides;  // the layout of a fresh one.
  c10::ScalarType type = c10::ScalarType::Undefined;  // Undefined: there is no tensor.
  int64_t bytes = 0;
};
struct Known {
  std::vector<Result> results;
  Work work;
  bool draws = false;  // Whether the operator takes a generator.
};

// All that shapes depend on: the operator and the layouts and numbers of its arguments.
class Question {
 public:
  bool is_plain = true;  // Whether the answer can be kept.

  explicit Question(const c10::FunctionSchema& schema) {
    put(&schema);
    put(c10::get_default_dtype_as_scalartype());
    // A view is another one for each tensor.
    for (auto& r : schema.returns()) is_plain &= !r.alias_info() || r.alias_info()->isWrite();
  }
  void put(const c10::IValue& value) {
    if (!is_plain) return;
    key_ += char('0' + int(value.isNone()));
    if (value.isNone() || value.isGenerator()) return;
    if (value.isTensor()) return put(value.toTensor());
    if (value.isInt()) return put('i', value.toInt());
    if (value.isDouble()) return put('d', value.toDouble());
    if (value.isBool()) return put('b', value.toBool());
    if (value.isSymInt()) return put('i', value.toSymInt().guard_int(__FILE__, __LINE__));
    if (value.isString()) return put('s', value.toStringRef().size()), void(key_ += value.toStringRef());
    if (value.isDevice() && value.toDevice().type() == kDeviceType) return void(key_ += 'v');
    if (!value.isList()) return void(is_plain = false);
    put('l', value.toListRef().size());
    for (const c10::IValue& inner : value.toListRef()) put(inner);
  }

  // An operator may return an argument, so it matters which of them are one tensor.
  void same_as(int place) { put(place); }

  const Known* find() const {
    if (!is_plain) return nullptr;
    std::shared_lock<std::shared_mutex> lock(known().mutex);
    auto found = known().map.find(key_);
    return found == known().map.end() ? nullptr : &found->second;
  }
  void keep(Known answer) const {
    std::unique_lock<std::shared_mutex> lock(known().mutex);
    known().map.emplace(key_, std::move(answer));
  }

 private:
  struct All {
    std::shared_mutex mutex;
    std::unordered_map<std::string, Known> map;
  };
  static All& known() {
    static auto* it = new All;
    return *it;
  }
  template <class T>
  void put(const T& value) {
    key_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  template <class T>
  void put(char kind, const T& value) {
    key_ += kind;
    put(value);
  }
  void put(const at::Tensor& t) {
    if (!t.defined()) return void(key_ += 'u');
    // The values of the host's tensors may matter, of masks for one.
    bool is_ours = t.device().type() == kDeviceType;
    if ((!is_ours && t.dim() > 0) || t.layout() != c10::kStrided) return void(is_plain = false);
    put(is_ours ? 't' : 'h', t.scalar_type());
    put(t.dim());
    for (auto x : t.sizes()) put(x);
    for (auto x : t.strides()) put(x);
    auto* it = t.unsafeGetTensorImpl();
    put(char(it->is_wrapped_number() | it->is_conj() << 1 | it->is_neg() << 2));
  }
  std::string key_;
};

}  // namespace virtual_accelerator
