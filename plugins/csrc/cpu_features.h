// Which instruction sets this machine runs, and the kernels of the best one.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "kernel.h"

namespace llmc {

// The levels that were compiled in and that the processor and the operating system support, best last.
const std::vector<std::string>& supported_isas();

// A kernel of that level or the nearest lower one. Fails if the op, or the level, is unknown here, and if the kernel
// did not read every attribute.
std::unique_ptr<Kernel> make_kernel(const std::string& op, const std::string& isa, const Attributes& attributes);

// All ops that have a kernel.
std::vector<std::string> known_ops();

}  // namespace llmc
