// Memory that ends where an unreadable page begins.
//
// Address sanitizer sees what the compiler instrumented; masked loads, gathers and tiles it does
// not see. The page after the last byte stops those too, and what lies before the first byte is
// poisoned for the sanitizer.
#ifndef DUSTIN_TESTS_GUARDED_H_
#define DUSTIN_TESTS_GUARDED_H_

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define DUSTIN_TESTS_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define DUSTIN_TESTS_ASAN 1
#endif
#endif
#ifdef DUSTIN_TESTS_ASAN
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size)
#define ASAN_UNPOISON_MEMORY_REGION(address, size)
#endif

template <typename T>
class Guarded {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  explicit Guarded(std::size_t size) : size_(size) {
    const std::size_t page = sysconf(_SC_PAGESIZE), bytes = size * sizeof(T);
    usable_ = (bytes + page - 1) / page * page;
    mapped_ = usable_ + 2 * page;  // one before, one after
    void* mapping = mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED) throw std::bad_alloc();
    start_ = static_cast<char*>(mapping);
    if (usable_ != 0 && mprotect(start_ + page, usable_, PROT_READ | PROT_WRITE) != 0)
      throw std::bad_alloc();
    data_ = reinterpret_cast<T*>(start_ + page + usable_ - bytes);
    ASAN_POISON_MEMORY_REGION(start_ + page, usable_ - bytes);
  }
  Guarded(std::size_t size, T value) : Guarded(size) {
    for (T& element : *this) element = value;
  }
  explicit Guarded(const std::vector<T>& values) : Guarded(values.size()) {
    if (size_ != 0) std::memcpy(data_, values.data(), size_ * sizeof(T));
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() {
    ASAN_UNPOISON_MEMORY_REGION(start_, mapped_);
    munmap(start_, mapped_);
  }

  T* data() { return data_; }
  const T* data() const { return data_; }
  std::size_t size() const { return size_; }
  T* begin() { return data_; }
  T* end() { return data_ + size_; }
  T& operator[](std::size_t i) { return data_[i]; }
  const T& operator[](std::size_t i) const { return data_[i]; }
  std::vector<T> copy() const { return std::vector<T>(data_, data_ + size_); }
  bool same_bytes(const std::vector<T>& other) const {
    return size_ == other.size() &&
           (size_ == 0 || std::memcmp(data_, other.data(), size_ * sizeof(T)) == 0);
  }

 private:
  std::size_t size_, usable_, mapped_;
  char* start_;
  T* data_;
};

#endif  // DUSTIN_TESTS_GUARDED_H_
