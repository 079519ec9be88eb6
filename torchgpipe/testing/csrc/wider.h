// Wider dtypes: what the CPU computes where it has no kernel for a dtype that accelerators compute.
#pragma once
#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace virtual_accelerator {

// The dtype in which an operator is computed instead. Accelerators compute half precision wherever
// they compute single precision. Of integers that is known by the operator alone: most operators
// that have no kernel for them on the CPU have none anywhere.
inline std::optional<c10::ScalarType> wider(const std::string& op, c10::ScalarType type) {
  static const std::set<std::string> integers{"histc"}, bools{"abs", "trace"};
  if (type == c10::kHalf || type == c10::kBFloat16) return c10::kFloat;
  if (type == c10::kBool) return bools.count(op) ? std::make_optional(c10::kByte) : std::nullopt;
  if (c10::isIntegralType(type, false) && integers.count(op)) return c10::kDouble;
  return std::nullopt;
}

// Arguments in a wider dtype, and the results in their own again.
class Widened {
 public:
  explicit Widened(std::string op) : op_(std::move(op)) {}

  c10::IValue argument(const c10::IValue& value, bool is_written) {
    if (value.isTensor()) return widened(value.toTensor(), is_written);
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorList()) list.push_back(widened(t, is_written));
      return list;
    }
    return value;
  }
  // Whether there is a wider dtype, and nobody has to guess of which dtype a result is.
  bool is_of_use() const { return !pairs_.empty() && narrow_ && !is_mixed_; }

  // What the operator has written to arguments goes back to these.
  void put_back() {
    for (auto& [own, wide, is_written] : pairs_) {
      if (!is_written) continue;
      if (own.sizes() != wide.sizes()) own.resize_(wide.sizes());
      own.copy_(wide);
    }
  }
  c10::IValue result(const c10::IValue& value) {
    if (value.isTensor()) return narrowed(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorList()) list.push_back(narrowed(t));
      return list;
    }
    return value;
  }

 private:
  struct Pair {
    at::Tensor own, wide;
    bool is_written;
  };
  at::Tensor widened(const at::Tensor& t, bool is_written) {
    if (!t.defined()) return t;
    for (auto& pair : pairs_)
      if (pair.own.is_same(t)) {
        pair.is_written |= is_written;
        return pair.wide;
      }
    auto type = wider(op_, t.scalar_type());
    if (!type) {
      is_mixed_ |= t.scalar_type() == wide_;
      others_.insert(t.scalar_type());
      return t;
    }
    is_mixed_ |= (narrow_ && *narrow_ != t.scalar_type()) || others_.count(*type);
    narrow_ = t.scalar_type();
    wide_ = *type;
    pairs_.push_back({t, t.to(*type), is_written});
    return pairs_.back().wide;
  }
  at::Tensor narrowed(const at::Tensor& t) {
    if (!t.defined()) return t;
    for (auto& pair : pairs_)
      if (pair.wide.is_same(t)) return pair.own;
    return t.scalar_type() == wide_ ? t.to(*narrow_) : t;
  }

  std::string op_;
  std::vector<Pair> pairs_;
  std::optional<c10::ScalarType> narrow_;
  c10::ScalarType wide_ = c10::ScalarType::Undefined;
  std::set<c10::ScalarType> others_;
  bool is_mixed_ = false;
};

// Compute an operator of the CPU, whose arguments are on a stack.
inline void compute(const c10::OperatorHandle& op, const std::string& name, const std::vector<bool>& is_written,
                    torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  size_t base = stack->size() - op.schema().arguments().size();
  // A call that fails may have taken some of them away.
  std::vector<c10::IValue> arguments(stack->begin() + base, stack->end());
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    return;
  } catch (const c10::NotImplementedError&) {
    Widened widened(name);
    stack->resize(base);
    for (size_t i = 0; i < arguments.size(); i++) stack->push_back(widened.argument(arguments[i], is_written[i]));
    if (!widened.is_of_use()) throw;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    widened.put_back();
    for (size_t i = base; i < stack->size(); i++) (*stack)[i] = widened.result((*stack)[i]);
  }
}

}  // namespace virtual_accelerator
