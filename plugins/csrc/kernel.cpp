// The kernel table and the attributes of steps.
#include "kernel.h"

namespace llmc {
namespace {

const char* kind(const Attributes::Value& value) {
  constexpr const char* names[] = {"an int", "a float", "a string", "a bool"};
  return names[value.index()];
}

}  // namespace

const Attributes::Value& Attributes::get(const std::string& name) const {
  const auto found = values_.find(name);
  if (found == values_.end()) fail("attribute '" + name + "' is missing");
  read_[name] = true;
  return found->second;
}

std::int64_t Attributes::integer(const std::string& name) const {
  const Value& value = get(name);
  if (const auto* number = std::get_if<std::int64_t>(&value)) return *number;
  fail("attribute '" + name + "' must be an int, not " + kind(value));
}

double Attributes::real(const std::string& name) const {
  const Value& value = get(name);
  if (const auto* number = std::get_if<double>(&value)) return *number;
  if (const auto* number = std::get_if<std::int64_t>(&value)) return static_cast<double>(*number);
  fail("attribute '" + name + "' must be a float, not " + kind(value));
}

bool Attributes::flag(const std::string& name) const {
  const Value& value = get(name);
  if (const auto* truth = std::get_if<bool>(&value)) return *truth;
  fail("attribute '" + name + "' must be a bool, not " + kind(value));
}

const std::string& Attributes::text(const std::string& name) const {
  const Value& value = get(name);
  if (const auto* text = std::get_if<std::string>(&value)) return *text;
  fail("attribute '" + name + "' must be a string, not " + kind(value));
}

std::int64_t Attributes::integer(const std::string& name, std::int64_t otherwise) const {
  return values_.contains(name) ? integer(name) : otherwise;
}

std::string Attributes::text(const std::string& name, const char* otherwise) const {
  return values_.contains(name) ? text(name) : otherwise;
}

std::vector<std::string> Attributes::unread() const {
  std::vector<std::string> names;
  for (const auto& [name, value] : values_) {
    if (!read_.contains(name)) names.push_back(name);
  }
  return names;
}

std::map<std::string, std::map<std::string, KernelMaker>>& kernel_table() {
  static std::map<std::string, std::map<std::string, KernelMaker>> table;
  return table;
}

void fail(const std::string& message) { throw std::invalid_argument(message); }

}  // namespace llmc
