// What this machine can do at most: the yardstick that `llmc bench --ceilings` puts beside its figures.
#pragma once
#include <map>
#include <string>

#include "thread_pool.h"

namespace llmc {

// In units of 10^9 a second: "read_bandwidth" (bytes of a buffer of that size), and for the instructions that the
// machine has "fp32", "bf16", "amx_bf16" (floating-point operations) and "int8" (operations). Takes about a second.
std::map<std::string, double> measure_ceilings(WorkerPool& pool, std::size_t bytes);

}  // namespace llmc
