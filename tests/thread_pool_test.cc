#include "kernels/thread_pool.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace retrace {
namespace {

TEST(ThreadPool, EveryTaskRunsOnceUnderAWorkerOfThePool) {
  for (int threads : {1, 2, 3, 9}) {
    ThreadPool pool(threads);
    for (int64_t tasks : {0, 1, 2, 3, 8, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<size_t>(tasks));
      std::atomic<int> strangers{0};
      pool.Run(tasks, [&](int64_t task, int worker) {
        runs[static_cast<size_t>(task)].fetch_add(1);
        if (worker < 0 || worker >= threads) strangers.fetch_add(1);
      });
      for (const std::atomic<int>& count : runs) EXPECT_EQ(1, count.load());
      EXPECT_EQ(0, strangers.load());
    }
  }
}

// In a process of its own, whose memory is limited so that few of the threads can start.
void RunUnderAMemoryLimit() {
  long pages = 0;
  std::FILE* statm = std::fopen("/proc/self/statm", "r");
  if (statm == nullptr || std::fscanf(statm, "%ld", &pages) != 1) std::_Exit(3);
  const rlim_t most = static_cast<rlim_t>(pages) * 4096 + (rlim_t{64} << 20);  // stacks: 8 MiB each
  const rlimit limit = {most, most};
  if (setrlimit(RLIMIT_AS, &limit) != 0) std::_Exit(3);
  ThreadPool pool(500);
  std::vector<std::atomic<int>> runs(10000);
  for (int round = 0; round < 20; ++round) {
    pool.Run(10000, [&](int64_t task, int) { runs[static_cast<size_t>(task)].fetch_add(1); });
  }
  for (const std::atomic<int>& count : runs) {
    if (count.load() != 20) std::_Exit(4);
  }
  std::_Exit(0);
}

TEST(ThreadPoolDeathTest, FewerThreadsThanAskedForDoAllOfTheWork) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need more address space than the limit leaves";
#endif
  EXPECT_EXIT(RunUnderAMemoryLimit(), testing::ExitedWithCode(0), "");
}

TEST(ThreadPool, NoWorkerRunsTwoTasksAtATime) {
  ThreadPool pool(5);  // more threads than most test machines have cores
  std::vector<std::atomic<int>> busy(5);
  std::atomic<int> clashes{0};
  for (int run = 0; run < 200; ++run) {
    pool.Run(20, [&](int64_t, int worker) {
      if (busy[static_cast<size_t>(worker)].exchange(1) != 0) clashes.fetch_add(1);
      busy[static_cast<size_t>(worker)].store(0);
    });
  }
  EXPECT_EQ(0, clashes.load());
}

// Plain (not atomic) data, so a thread sanitizer sees whether Run orders memory, and a task of one
// run that leaks into the next shows as a wrong sum.
TEST(ThreadPool, ManyTinyRunsSeeEachOthersWrites) {
  for (int threads : {2, 3, 8}) {
    ThreadPool pool(threads);
    std::vector<int64_t> values(7, 0);
    for (int64_t run = 0; run < 20000; ++run) {
      const int64_t tasks = 2 + run % 6;
      pool.Run(tasks, [&](int64_t task, int) { values[static_cast<size_t>(task)] += run; });
      const int64_t sum = std::accumulate(values.begin(), values.end(), int64_t{0});
      ASSERT_EQ(tasks * run, sum) << "run " << run << " of " << threads << " threads";
      std::fill(values.begin(), values.end(), 0);
    }
  }
}

TEST(ThreadPool, SleepingWorkersWakeUpForTheNextRun) {
  ThreadPool pool(2);
  for (int run = 0; run < 3; ++run) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // far beyond any spinning
    // Each task waits for the other: only two threads can end this run.
    std::atomic<int> arrived{0};
    pool.Run(2, [&](int64_t, int) {
      arrived.fetch_add(1);
      while (arrived.load() < 2) std::this_thread::yield();
    });
    EXPECT_EQ(2, arrived.load());
  }
}

TEST(ThreadPool, TheCallerSleepsThroughALongTaskOfAnother) {
  ThreadPool pool(2);
  std::atomic<int> arrived{0};
  std::atomic<bool> other_done{false};
  pool.Run(2, [&](int64_t, int worker) {
    arrived.fetch_add(1);
    while (arrived.load() < 2) std::this_thread::yield();
    if (worker != 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      other_done.store(true);
    }
  });
  EXPECT_TRUE(other_done.load());
}

TEST(ThreadPool, PoolOfOneRunsInlineAndInOrder) {
  ThreadPool pool(1);
  const std::thread::id caller = std::this_thread::get_id();
  std::vector<int64_t> order;
  pool.Run(4, [&](int64_t task, int worker) {
    EXPECT_EQ(caller, std::this_thread::get_id());
    EXPECT_EQ(0, worker);
    order.push_back(task);
  });
  EXPECT_EQ((std::vector<int64_t>{0, 1, 2, 3}), order);
}

TEST(ThreadPool, RowsArePartitionedWithoutGapsInPiecesOfAtLeastTheMinimum) {
  for (int threads : {1, 3}) {
    ThreadPool pool(threads);
    for (int64_t rows : {0, 1, 7, 64, 1001}) {
      for (int64_t min_rows : {1, 10, 2000}) {
        std::vector<std::atomic<int>> seen(static_cast<size_t>(rows));
        std::atomic<int> too_short{0};
        ParallelRows(pool, rows, min_rows, [&](int64_t begin, int64_t end, int) {
          if (end - begin < std::min(rows, min_rows)) too_short.fetch_add(1);
          for (int64_t row = begin; row < end; ++row) seen[static_cast<size_t>(row)].fetch_add(1);
        });
        for (const std::atomic<int>& count : seen) EXPECT_EQ(1, count.load());
        EXPECT_EQ(0, too_short.load()) << rows << " rows, at least " << min_rows;
      }
    }
  }
}

TEST(ThreadPool, AvailableCpusIsTheAffinityMaskOfTheProcess) {
  cpu_set_t before;
  if (sched_getaffinity(0, sizeof(before), &before) != 0) {
    GTEST_SKIP() << "this kernel has more processors than cpu_set_t";
  }
  EXPECT_EQ(CPU_COUNT(&before), AvailableCpus());
  int first = 0;
  while (!CPU_ISSET(first, &before)) ++first;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(first, &one);
  ASSERT_EQ(0, sched_setaffinity(0, sizeof(one), &one));
  EXPECT_EQ(1, AvailableCpus());
  ASSERT_EQ(0, sched_setaffinity(0, sizeof(before), &before));
}

TEST(ThreadPoolDeathTest, NestedRunIsACheckedError) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (int threads : {1, 2}) {
    EXPECT_DEATH(
        {
          ThreadPool pool(threads);
          pool.Run(2, [&](int64_t, int) { pool.Run(1, [](int64_t, int) {}); });
        },
        "was_running");
  }
}

#if defined(__x86_64__)
TEST(ThreadPoolDeathTest, FlushToZeroInAnyWorkerIsACheckedError) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (unsigned bits : {0x8000u, 0x0040u, 0x2000u}) {  // FTZ, DAZ, round down
    for (int guilty : {0, 1}) {
      EXPECT_DEATH(
          {
            ThreadPool pool(2);
            for (int run = 0; run < 2; ++run) {
              std::atomic<int> arrived{0};
              pool.Run(2, [&](int64_t, int worker) {
                arrived.fetch_add(1);
                while (arrived.load() < 2) std::this_thread::yield();  // one task for each
                if (worker == guilty) _mm_setcsr(_mm_getcsr() | bits);
              });
            }
          },
          "clause 1");
    }
  }
}
#endif

}  // namespace
}  // namespace retrace
