// Segments: how PyTorch's caching allocator of CUDA divides a device's memory, in numbers alone.
//
// A segment is what the allocator takes from the device, and gives back when memory runs short.
// Source: c10/cuda/CUDACachingAllocator.cpp, with its default settings.
#pragma once
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <tuple>

namespace virtual_accelerator {

class Segments {
 public:
  int64_t reserved = 0;

  static int64_t rounded(int64_t bytes) { return std::max((bytes + 511) / 512, int64_t(1)) * 512; }

  // Find room for a tensor of a stream, and return its address. Above the capacity, segments that
  // nobody uses are given back first.
  int64_t take(int64_t bytes, int stream, int64_t capacity) {
    bytes = rounded(bytes);
    bool is_small = bytes <= kMiB;
    // The smallest piece that is large enough.
    auto fit = free_.lower_bound({is_small, stream, bytes, 0});
    int64_t address;
    if (fit != free_.end() && std::get<0>(*fit) == is_small && std::get<1>(*fit) == stream) {
      address = std::get<3>(*fit);
      free_.erase(fit);
    } else {
      int64_t size = is_small ? 2 * kMiB : bytes < 10 * kMiB ? 20 * kMiB : (bytes + 2 * kMiB - 1) / (2 * kMiB) * (2 * kMiB);
      if (reserved + size > capacity) trim();
      address = end_;
      end_ += size + kGap;
      reserved += size;
      pieces_[address] = {size, stream, is_small, true};
    }
    auto& piece = pieces_[address];
    piece.is_free = false;
    int64_t rest = piece.size - bytes;
    if (is_small ? rest >= 512 : rest > kMiB) {
      piece.size = bytes;
      pieces_[address + bytes] = {rest, stream, is_small, true};
      free_.insert(key(address + bytes));
    }
    return address;
  }
  void give(int64_t address) {
    auto it = pieces_.find(address);
    it->second.is_free = true;
    // Neighbours lie in one segment, since there is a gap between segments.
    auto join = [this](auto left, auto right) {
      if (left->first + left->second.size != right->first || !left->second.is_free || !right->second.is_free) return left;
      free_.erase(key(left->first));
      free_.erase(key(right->first));
      left->second.size += right->second.size;
      pieces_.erase(right);
      return left;
    };
    if (auto next = std::next(it); next != pieces_.end()) join(it, next);
    if (it != pieces_.begin()) {
      auto before = std::prev(it);
      if (before->second.is_free && before->first + before->second.size == it->first) it = join(before, it);
    }
    free_.insert(key(it->first));
  }
  // Give the segments back that nobody uses.
  void trim() {
    for (auto it = pieces_.begin(); it != pieces_.end();) {
      auto next = std::next(it);
      bool begins = it == pieces_.begin() || std::prev(it)->first + std::prev(it)->second.size != it->first;
      bool ends = next == pieces_.end() || it->first + it->second.size != next->first;
      if (it->second.is_free && begins && ends) {
        reserved -= it->second.size;
        free_.erase(key(it->first));
        pieces_.erase(it);
      }
      it = next;
    }
  }

 private:
  static constexpr int64_t kMiB = 1 << 20, kGap = 512;
  struct Piece {
    int64_t size;
    int stream;
    bool is_small, is_free;
  };
  using Key = std::tuple<bool, int, int64_t, int64_t>;  // Small, stream, size, address.
  Key key(int64_t address) {
    auto& piece = pieces_[address];
    return {piece.is_small, piece.stream, piece.size, address};
  }
  std::map<int64_t, Piece> pieces_;  // By address.
  std::set<Key> free_;
  int64_t end_ = kGap;
};

}  // namespace virtual_accelerator
