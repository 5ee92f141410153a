// What went wrong, where, and on which instruction set and threads.
#ifndef DUSTIN_TESTS_CHECK_H_
#define DUSTIN_TESTS_CHECK_H_

#include <cmath>
#include <cstdio>
#include <functional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "dustin/kernels.h"

struct Report {
  long checks = 0, failures = 0;
  std::string where;  // the case in work

  static Report& get() {
    static Report report;
    return report;
  }
};

inline bool check(bool right, const char* what) {
  Report& report = Report::get();
  ++report.checks;
  if (!right && ++report.failures <= 20)
    std::fprintf(stderr, "FAILED %s: %s\n", report.where.c_str(), what);
  return right;
}

inline bool succeeds(int32_t status) { return check(status == DUSTIN_OK, dustin_last_error()); }

// |got - want| <= relative * |want| + absolute, which NaN never is.
inline bool near(double got, double want, double relative, double absolute, const char* what) {
  const bool close = std::abs(got - want) <= relative * std::abs(want) + absolute;
  if (close) return check(true, "");
  std::ostringstream text;
  text << what << " is " << got << " and should be " << want;
  return check(false, text.str().c_str());
}

inline bool returned(int32_t got, int32_t want) {
  return check(got == want, ("returned status " + std::to_string(got)).c_str());
}

// A pool as GOMP_parallel is one.
inline void run_on_threads(void (*body)(void*), void* data, unsigned threads, unsigned) {
  std::vector<std::thread> others;
  for (unsigned i = 1; i < threads; ++i) others.emplace_back(body, data);
  body(data);
  for (std::thread& other : others) other.join();
}

inline std::vector<std::string> instruction_sets() {
  std::istringstream names(dustin_cpu_isas());
  std::vector<std::string> sets;
  for (std::string name; names >> name;) sets.push_back(name);
  return sets;
}

// `run(threads)` on every instruction set, alone and in a pool.
inline void everywhere(const std::string& what, const std::function<void(int threads)>& run) {
  for (const std::string& isa : instruction_sets()) {
    Report::get().where = what + ", " + isa;
    succeeds(dustin_cpu_use_isa(isa.c_str()));
    for (const int threads : {1, 3}) {
      Report::get().where = what + ", " + isa + ", threads=" + std::to_string(threads);
      dustin_cpu_use_pool(threads > 1 ? run_on_threads : nullptr);
      run(threads);
    }
  }
  dustin_cpu_use_pool(nullptr);
}

#endif  // DUSTIN_TESTS_CHECK_H_
