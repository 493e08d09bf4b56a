// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// InScratch calls f with a new network namespace, which it then deletes. It needs CAP_SYS_ADMIN.
func InScratch(f func(*Node) error) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine, and the namespace with it
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			result <- fmt.Errorf("make a network namespace: %w", err)
			return
		}
		scratch, err := Host()
		if err == nil {
			defer scratch.Close()
			err = f(scratch)
		}
		result <- err
	}()
	return <-result
}
