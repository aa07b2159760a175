// Programmatic dependent launch: a kernel may begin while the previous one on the stream ends.
#pragma once

#include <cutlass/cutlass.h>

namespace fa3 {

// Waits until the previous kernel has ended and its writes are visible. Call it before any access to them.
CUTLASS_DEVICE void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel begin as soon as there is room for it.
CUTLASS_DEVICE void grid_dependency_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace fa3
