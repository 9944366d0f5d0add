// Scratch memory that grows and stays, on cache-line boundaries: a vector that straddles two lines costs
// twice.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace h2o {

template <typename T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  // Room for `size` elements; what was in it may be lost.
  void reserve(int64_t size) {
    if (size <= size_) return;
    std::free(data_);
    const size_t bytes = (size * sizeof(T) + kLine - 1) / kLine * kLine;
    data_ = static_cast<T*>(std::aligned_alloc(kLine, bytes));
    if (!data_) throw std::bad_alloc();
    size_ = size;
  }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }

 private:
  static constexpr size_t kLine = 64;
  T* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace h2o
