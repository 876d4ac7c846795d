// The exhaustive explorer: every order in which the steps of a system of straight-line programs can happen.
//
// pk/sim/system.py says what a system is, pk/sim/twin.py is the same search in Python: both must give the same numbers.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace pk {

// Programs in flat form (System.flat): actor a has the steps actors[a] .. actors[a + 1], step s the guards
// guards[guard_first[s]] .. and so on.  Variables: counters first, then how many steps each actor has taken.
struct Programs {
    std::vector<std::int32_t> actors;         // A + 1 offsets into the steps
    std::vector<std::int32_t> guard_first;    // S + 1
    std::vector<std::int32_t> guards;         // variable, value, 1 for "exactly" and 0 for "at least"
    std::vector<std::int32_t> add_first;      // S + 1
    std::vector<std::int32_t> adds;           // counter, value
    std::vector<std::int32_t> require_first;  // S + 1
    std::vector<std::int32_t> requires_;      // variable, value: must be at least that when the step is taken
    std::vector<std::int32_t> start;          // C first values of the counters
    std::vector<std::int32_t> free;           // S: 1 if nothing that others do can matter to the step, nor it to them
    std::vector<std::int32_t> watch;          // C + A: the largest value that a step requires of a variable, or the least int32
};

struct Limits {
    std::uint64_t states = 0;
    bool reduce = true;
    bool deadlocks = true;  // whether a state in which nothing can happen is a failure
    bool stop = true;       // at the first failure
};

struct Failure {
    bool deadlock = false;
    std::uint32_t state = 0;
    std::int32_t actor = -1;           // whose step's requirement did not hold
    std::vector<std::int32_t> trace;   // actors, in the order of their steps; the failing step comes last
};

struct Found {
    std::uint64_t states = 0, transitions = 0, deadlocks = 0, violations = 0, finals = 0, widest = 0;
    std::uint32_t depth = 0;
    bool complete = false;
    std::vector<Failure> failures;  // the first few
};

inline constexpr std::size_t KEPT = 16;  // failures with a trace

// Throws std::invalid_argument for programs that do not fit; `poll` is called every 65,536 states and may throw.
Found explore(const Programs& programs, const Limits& limits, const std::function<void()>& poll);

// For each event (actor, step) of a monotone system: how many steps each actor takes when that one is never taken.
std::vector<std::int32_t> reach(const Programs& programs, const std::vector<std::int32_t>& events);

// Throws std::invalid_argument for programs that do not fit.
void check(const Programs& programs);

}  // namespace pk
