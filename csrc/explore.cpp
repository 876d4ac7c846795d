// Breadth first, layer by layer.  A state is how far every actor is; the counters follow from that.  Every path to a
// state has the same length (the sum of its program counters), so equal states meet in one layer: only two layers are
// held in full, and of all the others how each state was reached (6 bytes), which is what a trace is made of.

#include "explore.hpp"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <utility>

namespace pk {
namespace {

using std::int32_t;
using std::size_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;

uint64_t mixed(uint64_t x) {  // splitmix64
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

// One actor: where its program counter lies in a state, and its share of the hash (the sum of pc * factor).
struct Field {
    uint32_t word, shift;
    uint64_t mask, one, factor;
    int32_t first, length;
};

// What a step has done to the counters by the time its actor is past it: entries of one actor's prefix sums.
struct Sum {
    int32_t counter, value;
};

// The states of one depth, and for each the sum of pc * factor over its actors: its name in the hash table.
struct Layer {
    std::vector<uint64_t> words, sums;
    uint64_t base = 0;  // number of its first state
    size_t count() const { return sums.size(); }
    void clear() {
        words.clear();
        sums.clear();
    }
};

// Open addressing; an entry is the upper half of the hash and 1 + the index in the layer.
class Table {
public:
    void reset(size_t expected) {
        size_t slots = 1024;
        while (slots < 2 * expected) slots *= 2;
        entries_.assign(slots, 0);
        used_ = 0;
    }
    void prefetch(uint64_t sum) const { __builtin_prefetch(&entries_[mixed(sum) & (entries_.size() - 1)]); }

    // Whether `layer` has no such state yet; then it is entered with the index that it gets when it is appended.
    bool enter(uint64_t sum, const uint64_t* state, size_t words, const Layer& layer) {
        if (2 * used_ >= entries_.size()) grow(layer);
        const uint64_t hash = mixed(sum), tag = hash & 0xFFFFFFFF00000000u;
        const size_t mask = entries_.size() - 1;
        for (size_t at = hash & mask;; at = (at + 1) & mask) {
            const uint64_t entry = entries_[at];
            if (entry == 0) {
                entries_[at] = tag | (layer.count() + 1);
                ++used_;
                return true;
            }
            if ((entry & 0xFFFFFFFF00000000u) != tag) continue;
            const size_t index = (entry & 0xFFFFFFFFu) - 1;
            if (std::equal(state, state + words, &layer.words[index * words])) return false;
        }
    }

private:
    void grow(const Layer& layer) {
        std::vector<uint64_t> bigger(2 * entries_.size(), 0);
        const size_t mask = bigger.size() - 1;
        for (size_t i = 0; i < layer.count(); ++i) {
            const uint64_t hash = mixed(layer.sums[i]);
            size_t at = hash & mask;
            while (bigger[at] != 0) at = (at + 1) & mask;
            bigger[at] = (hash & 0xFFFFFFFF00000000u) | (i + 1);
        }
        entries_.swap(bigger);
    }

    std::vector<uint64_t> entries_;
    size_t used_ = 0;
};

// How every state was reached, in pieces that are never moved.
class Log {
public:
    void add(uint32_t parent, uint16_t actor) {
        if (size_ % PIECE == 0) {
            parents_.emplace_back(new uint32_t[PIECE]);
            actors_.emplace_back(new uint16_t[PIECE]);
        }
        parents_.back()[size_ % PIECE] = parent;
        actors_.back()[size_ % PIECE] = actor;
        ++size_;
    }
    std::vector<int32_t> path(uint32_t state) const {
        std::vector<int32_t> found;
        for (; state != 0; state = parents_[state / PIECE][state % PIECE])
            found.push_back(actors_[state / PIECE][state % PIECE]);
        std::reverse(found.begin(), found.end());
        return found;
    }

private:
    static constexpr size_t PIECE = size_t{1} << 18;
    std::vector<std::unique_ptr<uint32_t[]>> parents_;
    std::vector<std::unique_ptr<uint16_t[]>> actors_;
    size_t size_ = 0;
};

class Search {
public:
    Search(const Programs& p, const Limits& limits, const std::function<void()>& poll)
        : p_(p), limits_(limits), poll_(poll), counters_(p.start.size()), actors_(p.actors.size() - 1) {
        lay_out();
        sum_up();
        values_.resize(counters_ + actors_);
        next_.reserve(actors_ * words_);
    }

    Found run() {
        Layer here, there;
        here.words.assign(words_, 0);
        here.sums.assign(1, 0);
        log_.add(0, 0);
        found_.states = 1;
        found_.complete = true;
        while (here.count() != 0) {
            found_.widest = std::max<uint64_t>(found_.widest, here.count());
            there.clear();
            there.base = found_.states;
            table_.reset(here.count());
            for (size_t i = 0; i < here.count(); ++i) {
                if (((++expanded_) & 0xFFFF) == 0) poll_();
                if (!expand(here, i, there)) return finished();
            }
            found_.depth += there.count() != 0;
            std::swap(here, there);
        }
        return finished();
    }

private:
    void lay_out() {
        uint32_t word = 0, bit = 0;
        for (size_t a = 0; a < actors_; ++a) {
            const int32_t length = p_.actors[a + 1] - p_.actors[a];
            uint32_t bits = 0;
            while ((int64_t{1} << bits) <= length) ++bits;
            if (bit + bits > 64) ++word, bit = 0;
            fields_.push_back({word, bit & 63, (uint64_t{1} << bits) - 1, bits ? uint64_t{1} << (bit & 63) : 0,
                               mixed(a + 1), p_.actors[a], length});
            bit += bits;
        }
        words_ = word + 1;
    }

    // sums_[sum_first_[actors' steps + actor] ..]: what actor a has added once it has taken pc steps.
    void sum_up() {
        sum_first_.push_back(0);
        for (size_t a = 0; a < actors_; ++a) {
            std::vector<Sum> total;
            for (int32_t pc = 0;; ++pc) {
                sums_.insert(sums_.end(), total.begin(), total.end());
                sum_first_.push_back(static_cast<uint32_t>(sums_.size()));
                if (pc == fields_[a].length) break;
                const int32_t step = fields_[a].first + pc;
                for (int32_t i = p_.add_first[step]; i < p_.add_first[step + 1]; ++i) {
                    const int32_t counter = p_.adds[2 * i], value = p_.adds[2 * i + 1];
                    auto at = std::find_if(total.begin(), total.end(), [&](Sum s) { return s.counter == counter; });
                    if (at == total.end())
                        total.push_back({counter, value});
                    else
                        at->value += value;
                }
            }
        }
    }

    void decode(const uint64_t* state) {
        std::copy(p_.start.begin(), p_.start.end(), values_.begin());
        int32_t* pcs = values_.data() + counters_;
        for (size_t a = 0; a < actors_; ++a) {
            const Field& f = fields_[a];
            const int32_t pc = static_cast<int32_t>((state[f.word] >> f.shift) & f.mask);
            pcs[a] = pc;
            const size_t row = static_cast<size_t>(f.first) + a + static_cast<size_t>(pc);
            for (uint32_t i = sum_first_[row]; i < sum_first_[row + 1]; ++i) values_[sums_[i].counter] += sums_[i].value;
        }
    }

    bool enabled(int32_t step) const {
        for (int32_t i = p_.guard_first[step]; i < p_.guard_first[step + 1]; ++i) {
            const int32_t value = values_[p_.guards[3 * i]], needed = p_.guards[3 * i + 1];
            if (p_.guards[3 * i + 2] ? value != needed : value < needed) return false;
        }
        return true;
    }

    bool holds(int32_t step) const {
        for (int32_t i = p_.require_first[step]; i < p_.require_first[step + 1]; ++i)
            if (values_[p_.requires_[2 * i]] < p_.requires_[2 * i + 1]) return false;
        return true;
    }

    // Whether the step changes a variable that is still below what some step requires of it.
    bool watched(size_t actor, int32_t step) const {
        if (values_[counters_ + actor] < p_.watch[counters_ + actor]) return true;
        for (int32_t i = p_.add_first[step]; i < p_.add_first[step + 1]; ++i)
            if (values_[p_.adds[2 * i]] < p_.watch[p_.adds[2 * i]]) return true;
        return false;
    }

    void fail(bool deadlock, uint64_t state, int32_t actor) {
        if (found_.failures.size() < KEPT) found_.failures.push_back({deadlock, static_cast<uint32_t>(state), actor, {}});
        ++(deadlock ? found_.deadlocks : found_.violations);
    }

    // False: the search ends here.
    bool expand(const Layer& here, size_t index, Layer& there) {
        const uint64_t* state = &here.words[index * words_];
        const uint64_t number = here.base + index;
        decode(state);
        ready_.clear();
        bool finished = true, broken = false;
        int32_t alone = -1;
        const int32_t* pcs = values_.data() + counters_;
        for (size_t a = 0; a < actors_; ++a) {
            const Field& f = fields_[a];
            if (pcs[a] == f.length) continue;
            finished = false;
            const int32_t step = f.first + pcs[a];
            if (!enabled(step)) continue;
            ready_.push_back(static_cast<uint16_t>(a));
            if (!holds(step)) {
                fail(false, number, static_cast<int32_t>(a));
                if (limits_.stop) return false;
                broken = true;
            }
            if (limits_.reduce && alone < 0 && p_.free[step] && !watched(a, step)) alone = static_cast<int32_t>(a);
        }
        if (ready_.empty()) {
            found_.finals += finished;
            if (!finished && limits_.deadlocks) {
                fail(true, number, -1);
                if (limits_.stop) return false;
            }
            return true;
        }
        if (alone >= 0 && !broken) ready_.assign(1, static_cast<uint16_t>(alone));
        return spread(state, here.sums[index], number, there);
    }

    // Enters every successor; false when there is no room for one.
    bool spread(const uint64_t* state, uint64_t sum, uint64_t number, Layer& there) {
        next_.resize(ready_.size() * words_);
        uint64_t* out = next_.data();
        for (const uint16_t a : ready_) {
            std::copy(state, state + words_, out);
            out[fields_[a].word] += fields_[a].one;
            out += words_;
            table_.prefetch(sum + fields_[a].factor);
        }
        found_.transitions += ready_.size();
        out = next_.data();
        for (const uint16_t a : ready_) {
            const uint64_t next = sum + fields_[a].factor;
            if (table_.enter(next, out, words_, there)) {
                if (found_.states >= limits_.states) return found_.complete = false;
                there.words.insert(there.words.end(), out, out + words_);
                there.sums.push_back(next);
                log_.add(static_cast<uint32_t>(number), a);
                ++found_.states;
            }
            out += words_;
        }
        return true;
    }

    Found finished() {
        for (Failure& f : found_.failures) {
            f.trace = log_.path(f.state);
            if (!f.deadlock) f.trace.push_back(f.actor);
        }
        return std::move(found_);
    }

    const Programs& p_;
    const Limits limits_;
    const std::function<void()>& poll_;
    const size_t counters_, actors_;
    size_t words_ = 1;
    std::vector<Field> fields_;
    std::vector<Sum> sums_;
    std::vector<uint32_t> sum_first_;
    std::vector<int32_t> values_;  // counters, then program counters, of the state in hand
    std::vector<uint16_t> ready_;
    std::vector<uint64_t> next_;
    Table table_;
    Log log_;
    Found found_;
    uint64_t expanded_ = 0;
};

}  // namespace

void check(const Programs& p) {
    const auto fits = [](const std::vector<int32_t>& first, size_t count, size_t entries, size_t width) {
        return first.size() == count + 1 && first.front() == 0 && std::is_sorted(first.begin(), first.end()) &&
               static_cast<size_t>(first.back()) * width == entries;
    };
    const auto inside = [](const std::vector<int32_t>& entries, size_t width, size_t bound) {
        for (size_t i = 0; i < entries.size(); i += width)
            if (entries[i] < 0 || static_cast<size_t>(entries[i]) >= bound) return false;
        return true;
    };
    const size_t counters = p.start.size(), steps = p.free.size(), actors = p.actors.size() - 1;
    if (p.actors.empty() || actors > 0xFFFF || !fits(p.actors, actors, steps, 1) ||
        !fits(p.guard_first, steps, p.guards.size(), 3) || !fits(p.add_first, steps, p.adds.size(), 2) ||
        !fits(p.require_first, steps, p.requires_.size(), 2) || p.watch.size() != counters + actors ||
        !inside(p.guards, 3, counters + actors) || !inside(p.adds, 2, counters) ||
        !inside(p.requires_, 2, counters + actors))
        throw std::invalid_argument("explore: the programs are not those of a System");
}

Found explore(const Programs& programs, const Limits& limits, const std::function<void()>& poll) {
    check(programs);
    if (limits.states < 1 || limits.states >= 0xFFFFFFFFu)
        throw std::invalid_argument("explore: max_states must lie between 1 and 4,294,967,294");
    return Search(programs, limits, poll).run();
}

}  // namespace pk
