// The kernel of every operation that has none of its own.
#pragma once

#include <set>
#include <string>

namespace sim {

// Operations that turned out to need the host to wait, since their results' shapes depend on numbers.
std::set<std::string> operations_without_shapes();

} // namespace sim
