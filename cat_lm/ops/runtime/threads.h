// A loop over independent items in the threads of the process.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace {

using Region = void (*)(void*);
using Parallel = void (*)(Region, void*, unsigned, unsigned);

struct Team {
  void (*work)(void*, int64_t item, int64_t thread);
  void* context;
  int64_t items, grain;
  std::atomic<int64_t> next{0}, members{0};

  static void member(void* pointer) {
    auto& team = *static_cast<Team*>(pointer);
    const int64_t thread = team.members++;
    for (;;) {
      const int64_t first = team.next.fetch_add(team.grain);
      if (first >= team.items) return;
      const int64_t last = std::min(first + team.grain, team.items);
      for (int64_t item = first; item < last; ++item) team.work(team.context, item, thread);
    }
  }
};

// Runs call(item, thread) for all items; an item's result must not depend on the thread.
template <class Call>
void for_each(int64_t items, int64_t threads, void* runtime, Call call) {
  if (items < 1) return;
  Team team;
  team.work = [](void* c, int64_t item, int64_t thread) { (*static_cast<Call*>(c))(item, thread); };
  team.context = &call;
  team.items = items;
  threads = std::min(threads, items);
  team.grain = std::clamp<int64_t>(items / (threads * 16), 1, 16);
  if (threads > 1 && runtime) {
    reinterpret_cast<Parallel>(runtime)(Team::member, &team, unsigned(threads), 0);
    return;
  }
  std::vector<std::thread> others;
  try {
    for (int64_t i = 1; i < threads; ++i) others.emplace_back(Team::member, &team);
  } catch (const std::system_error&) {  // fewer threads than asked for: the others do the work
  }
  Team::member(&team);
  for (auto& other : others) other.join();
}

}  // namespace
