// Labels: numbers that Python gives to what a thread computes, such as a layer in a cell.
//
// Autograd's threads are given none. A node of autograd's graph belongs to what its thread computed
// when the node was recorded. Each thread numbers the nodes that it records, so it is enough to keep
// for each label the number of the next node. Nothing is done to nodes, and none is kept alive.
#pragma once
#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace virtual_accelerator {

// Counts the beginnings and ends of observations.
inline std::atomic<int64_t> epoch{0};

// The labels of a piece of work, 0 for none: that of its thread, and that of the node that runs.
struct Labels {
  int64_t own = 0, node = 0;
  bool operator==(const Labels&) const = default;
};

struct Labelling {
  struct From {
    uint64_t number;  // The first node that has the label.
    int64_t label;
  };
  std::mutex mutex;
  std::unordered_map<uint64_t, std::vector<From>> threads;
  std::atomic<bool> used{false};  // Whether there was any label in this observation.
  at::CallbackHandle handle{};
};
inline Labelling& labelling() {
  static auto* it = new Labelling;
  return *it;
}

struct ThreadLabels {
  int64_t epoch = -1;
  int64_t own = 0;
  int64_t node = -1;  // The label of the node that is called, -1 outside of any.
  int64_t last = 0;   // The label of the node before.
};
inline ThreadLabels& thread_labels() {
  thread_local ThreadLabels it;
  if (int64_t now = epoch; it.epoch != now) it = {now};
  return it;
}

// Give this thread a label. Python calls it, and holds its own lock meanwhile.
inline void set_label(int64_t label) {
  thread_labels().own = label;
  auto& all = labelling();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.used = true;
  all.threads[at::RecordFunction::currentThreadId()].push_back({at::sequence_number::peek(), label});
}

inline int64_t label_of(int64_t number, uint64_t thread) {
  // Nodes that add to a parameter's gradient have no number. They run right after the node that
  // their gradient comes from.
  if (number < 0) return thread_labels().last;
  auto& all = labelling();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto found = all.threads.find(thread);
  if (found == all.threads.end()) return 0;
  auto& labels = found->second;
  auto after = std::upper_bound(labels.begin(), labels.end(), uint64_t(number),
                                 [](uint64_t n, const Labelling::From& from) { return n < from.number; });
  return after == labels.begin() ? 0 : std::prev(after)->label;
}

inline Labels current_labels() {
  if (!labelling().used) return {};
  auto& t = thread_labels();
  if (t.node >= 0) return {t.own, t.node};
  // Hooks before a node, and sums of the gradients that it has computed.
  auto node = torch::autograd::get_current_node();
  return {t.own, node ? label_of(int64_t(node->sequence_nr()), node->thread_id()) : 0};
}

struct Outer final : public at::ObserverContext {
  int64_t epoch, node;
  Outer(int64_t e, int64_t n) : epoch(e), node(n) {}
};

// Begin or end labels. Meanwhile PyTorch tells which node it calls: a node may also be called as a
// function, within another one, and not by autograd.
inline void observe_labels(bool begins) {
  auto& all = labelling();
  {
    std::lock_guard<std::mutex> lock(all.mutex);
    all.threads.clear();
    all.used = false;
  }
  if (!begins) {
    if (all.handle) at::removeCallback(all.handle);
    all.handle = {};
    return;
  }
  auto start = [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
    auto& t = thread_labels();
    auto outer = std::make_unique<Outer>(t.epoch, t.node);
    t.node = t.last = label_of(function.seqNr(), function.forwardThreadId());
    return outer;
  };
  auto end = [](const at::RecordFunction&, at::ObserverContext* context) {
    auto* outer = static_cast<Outer*>(context);
    auto& t = thread_labels();
    if (outer && t.epoch == outer->epoch) t.node = outer->node;
  };
  all.handle = at::addGlobalCallback(at::RecordFunctionCallback(start, end).scopes({at::RecordScope::BACKWARD_FUNCTION}));
}

}  // namespace virtual_accelerator
