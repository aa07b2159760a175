// Programmatic dependent launch: a kernel may begin while the one before it on the stream ends.
#pragma once

#include <cutlass/cutlass.h>

namespace fa3 {

// Waits until the kernel before has ended and what it wrote is seen. Before any access to that.
CUTLASS_DEVICE void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel begin as soon as there is room for it.
CUTLASS_DEVICE void let_next_kernel_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace fa3
