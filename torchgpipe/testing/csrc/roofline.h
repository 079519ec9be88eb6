// The roofline: how long an operator takes on a described device.
//
//     time = launch + max(operations / (rate · efficiency), bytes / (bandwidth · efficiency))
//
// The efficiency of a bandwidth is that of operators that move bytes alone. An efficiency may depend
// on the size of an operator. Operations are counted for matrix products, convolutions and attention,
// two for a multiplication and its addition; in causal attention, for pairs of a query and a key that
// count.
// Whatever else an operator computes takes less time than its bytes.
// A convolution of 3 x 3 in float32 may be done in Winograd's way, as cuDNN does it: in tiles of
// 6 x 6 numbers for 4 x 4 pixels, with a quarter of the operations, but with more bytes.
// Source: Williams, Waterman and Patterson, Roofline (CACM 52:4, 2009); Lavin and Gray, Fast
// Algorithms for Convolutional Neural Networks (arXiv 1509.09308); the formulas of
// torch/utils/flop_counter.py.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include "hollow.h"

namespace virtual_accelerator {

struct Work {
  std::string kind = "other";
  double flops = 0, bytes = 0;
  double transformed = 0, tiles = 0;  // Bytes to make tiles, and of tiles; 0 without Winograd's way.
  c10::ScalarType type = c10::ScalarType::Undefined;  // Of what is multiplied.
};

inline double product(c10::IntArrayRef sizes, size_t from = 0) {
  double result = 1;
  for (size_t i = from; i < sizes.size(); i++) result *= double(sizes[i]);
  return result;
}
// The bytes that a kernel moves for a tensor: a dimension of stride 0 is there once.
inline double bytes_moved(const at::Tensor& t) {
  double bytes = double(t.element_size());
  for (int64_t i = 0; i < t.dim(); i++)
    if (t.stride(i) != 0 || t.size(i) == 0) bytes *= double(t.size(i));
  return bytes;
}
// Operators that change where a tensor lies, or its size, and move nothing.
inline bool moves_nothing(const std::string& op) {
  static const std::set<std::string> ops{"resize_",  "resize_as_",   "as_strided_",     "t_",       "transpose_", "squeeze_",
                                         "unsqueeze_", "detach_", "swapaxes_", "swapdims_", "resize", "set_"};
  return ops.count(op);
}

// The operations of an operator, by its arguments and the sizes of its result.
inline void count_operations(Work& work, const c10::FunctionSchema& schema, const std::string& op,
                             at::ArrayRef<c10::IValue> arguments, c10::IntArrayRef output) {
  auto sizes = [&](size_t i) { return arguments[i].toTensor().sizes(); };
  auto multiplies = [&](size_t a, size_t b) {
    work.kind = "matmul";
    work.type = arguments[a].toTensor().scalar_type();
    work.flops = 2 * product(sizes(a)) * double(sizes(b).back());
  };
  if (op == "mm" || op == "bmm") {
    multiplies(0, 1);
  } else if (op == "addmm" || op == "baddbmm" || op == "_addmm_activation") {
    multiplies(1, 2);
  } else if (op == "convolution" || op == "convolution_backward") {
    // For each position of what comes out: as many as the weight has for each of its filters. Each
    // gradient takes as many. The weight of a transposed convolution meets what goes in.
    bool backward = op == "convolution_backward";
    bool transposed = arguments[backward ? 7 : 6].toBool();
    auto weight = sizes(backward ? 2 : 1), input = sizes(backward ? 1 : 0), out = backward ? sizes(0) : output;
    work.kind = "convolution";
    work.type = arguments[0].toTensor().scalar_type();
    work.flops = 2 * double(input[0]) * product(transposed ? input : out, 2) * product(weight);
    int products = 1;
    if (backward) {
      auto wanted = arguments[10].toBoolList();
      products = int(wanted[0]) + int(wanted[1]);
    }
    work.flops *= products;
    auto is_one = [&](size_t i) {
      auto all = arguments[i + backward].toIntVector();
      return std::all_of(all.begin(), all.end(), [](int64_t x) { return x == 1; });
    };
    bool is_square = weight.size() == 4 && weight[2] == 3 && weight[3] == 3 && !transposed;
    bool is_plain = is_one(3) && is_one(5) && arguments[8 + backward].toInt() == 1;
    if (is_square && is_plain && work.type == c10::ScalarType::Float) {
      // A tile has 36 numbers for 16 pixels, or for the 9 of a filter, and somebody makes and reads it.
      double pixels = 4 * products * (product(input) + product(out)), filters = 4 * products * product(weight);
      work.tiles = 2.25 * pixels + 4 * filters;
      work.transformed = pixels + filters + work.tiles;
    }
  } else if (op.find("scaled_dot_product") != std::string::npos) {
    bool backward = op.find("backward") != std::string::npos;
    auto q = sizes(backward), k = sizes(backward + 1), v = sizes(backward + 2);
    work.kind = "attention";
    work.type = arguments[0].toTensor().scalar_type();
    double length = double(q[2]), pairs = length * double(k[2]);
    auto causal = schema.argumentIndexWithName("is_causal");
    if (causal && arguments[*causal].toBool()) {
      // Kernels skip pairs of which the key comes later. The first query sees one key, or as many
      // more as there are keys before the first query: FlashAttention's last query sees all.
      bool is_last = op.find("flash") != std::string::npos && op.find("for_cpu") == std::string::npos;
      double before = is_last ? double(k[2]) - length : 0;
      pairs = length * (before + (length + 1) / 2);
    }
    // Backward computes the products of queries and keys again, and has two more of each kind.
    double of_keys = double(q.back()), of_values = double(v.back());
    work.flops = 2 * double(q[0] * q[1]) * pairs * (backward ? 3 * of_keys + 2 * of_values : of_keys + of_values);
  }
}

// The milliseconds of a piece of work, which is counted among the parts of its device.
inline double time_of(const Work& work, const std::string& op, int device) {
  auto& speed = state().speed;
  auto share = [&](const std::string& kind, double size) {
    auto found = speed.efficiency.find(kind);
    if (found == speed.efficiency.end()) return 1.;
    auto& table = found->second;
    double at = std::log(std::max(size, 1.));
    auto above = std::find_if(table.begin(), table.end(), [&](auto& x) { return x.first >= at; });
    if (above == table.end()) return table.back().second;
    if (above == table.begin()) return above->second;
    auto below = std::prev(above);
    return below->second + (above->second - below->second) * (at - below->first) / (above->first - below->first);
  };
  double bandwidth = speed.bandwidth * share("other", work.bytes);
  double time = work.bytes / bandwidth;
  if (work.flops > 0) {
    auto rate = speed.rates.find(int8_t(work.type));
    if (rate == speed.rates.end())
      fail("rate", op + " of " + c10::toString(work.type), "hardware needs a rate for each dtype that is multiplied",
           "add it to the rates of the hardware");
    double compute = work.flops / (rate->second * share(work.kind, work.flops));
    time = std::max(time, compute);
    // A convolution that was measured went the way that its library chose.
    auto measured = speed.efficiency.find("convolution");
    bool is_measured = measured != speed.efficiency.end() && measured->second.size() > 1;
    if (work.tiles > 0 && !is_measured) time = std::min(time, work.transformed / bandwidth + std::max(compute / 4, work.tiles / bandwidth));
  }
  time += speed.launch;
  auto& part = state().parts[{device, work.kind, op}];
  part.count++;
  part.flops += work.flops;
  part.bytes += work.bytes;
  part.time += time;
  return time;
}

}  // namespace virtual_accelerator
