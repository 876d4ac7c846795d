// How far everybody comes without one particular step, in systems in which counters only grow: pk/sim/order.py says why
// one run decides it, and has the same in Python.

#include <stdexcept>

#include "explore.hpp"

namespace pk {
namespace {

class Run {
public:
    explicit Run(const Programs& p)
        : p_(p), counters_(p.start.size()), actors_(p.actors.size() - 1), waiting_(counters_ + actors_) {}

    // Appends to `out` how many steps each actor takes when actor `frozen` never takes its step `at`.
    void without(std::int32_t frozen, std::int32_t at, std::vector<std::int32_t>& out) {
        values_.assign(p_.start.begin(), p_.start.end());
        values_.resize(counters_ + actors_, 0);
        for (auto& list : waiting_) list.clear();
        ready_.clear();
        for (std::size_t a = actors_; a-- > 0;) ready_.push_back(static_cast<std::int32_t>(a));
        while (!ready_.empty()) {
            const std::int32_t actor = ready_.back();
            ready_.pop_back();
            advance(actor, actor == frozen ? at : -1);
        }
        out.insert(out.end(), values_.begin() + static_cast<std::ptrdiff_t>(counters_), values_.end());
    }

private:
    void advance(std::int32_t actor, std::int32_t stop) {
        const std::int32_t first = p_.actors[actor], length = p_.actors[actor + 1] - first;
        std::int32_t& pc = values_[counters_ + actor];
        while (pc < length && pc != stop) {
            const std::int32_t step = first + pc, missing = unmet(step);
            if (missing >= 0) {
                waiting_[missing].push_back(actor);
                return;
            }
            ++pc;
            wake(static_cast<std::int32_t>(counters_) + actor);
            for (std::int32_t i = p_.add_first[step]; i < p_.add_first[step + 1]; ++i) {
                values_[p_.adds[2 * i]] += p_.adds[2 * i + 1];
                wake(p_.adds[2 * i]);
            }
        }
    }

    // The variable of a guard that does not hold, or -1.
    std::int32_t unmet(std::int32_t step) const {
        for (std::int32_t i = p_.guard_first[step]; i < p_.guard_first[step + 1]; ++i)
            if (values_[p_.guards[3 * i]] < p_.guards[3 * i + 1]) return p_.guards[3 * i];
        return -1;
    }

    void wake(std::int32_t variable) {
        ready_.insert(ready_.end(), waiting_[variable].begin(), waiting_[variable].end());
        waiting_[variable].clear();
    }

    const Programs& p_;
    const std::size_t counters_, actors_;
    std::vector<std::vector<std::int32_t>> waiting_;  // by variable: actors whose next step needs more of it
    std::vector<std::int32_t> values_, ready_;
};

}  // namespace

std::vector<std::int32_t> reach(const Programs& programs, const std::vector<std::int32_t>& events) {
    check(programs);
    if (events.size() % 2 != 0) throw std::invalid_argument("reach: events are pairs of an actor and a step");
    Run run(programs);
    std::vector<std::int32_t> found;
    found.reserve(events.size() / 2 * (programs.actors.size() - 1));
    for (std::size_t i = 0; i < events.size(); i += 2) run.without(events[i], events[i + 1], found);
    return found;
}

}  // namespace pk
