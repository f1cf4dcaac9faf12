// Switching between the threads of a block.
#include "runtime.h"

namespace simt {

#if defined(__x86_64__)

extern "C" void simt_switch(void** save, void* to);
asm(R"(.text
.globl simt_switch
.type simt_switch,@function
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch,.-simt_switch
.section .note.GNU-stack,"",@progbits
.text)");

void switch_context(Context& from, Context& to) { simt_switch(&from.stack_pointer, to.stack_pointer); }

void make_context(Context& context, char* stack, size_t size, void (*entry)()) {
  auto** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack + size) & ~uintptr_t{15});
  *--top = nullptr;  // where entry would return to
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;  // the saved registers
  context.stack_pointer = top;
}

#else

void switch_context(Context& from, Context& to) { swapcontext(&from.context, &to.context); }

void make_context(Context& context, char* stack, size_t size, void (*entry)()) {
  getcontext(&context.context);
  context.context.uc_stack.ss_sp = stack;
  context.context.uc_stack.ss_size = size;
  context.context.uc_link = nullptr;
  makecontext(&context.context, entry, 0);
}

#endif

}  // namespace simt
