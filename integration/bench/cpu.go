// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// userHZ is the unit of /proc/<pid>/stat on every architecture that Go runs on.
const userHZ = 100

// cpuTime is the processor time of this process and of the kernel's softirq threads so far. Softirq work done in
// the process's own context is charged to the process; load of other processes does not count.
func cpuTime() (time.Duration, error) {
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &usage); err != nil {
		return 0, fmt.Errorf("read own processor time: %w", err)
	}
	total := time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
	threads, err := processTime(softirq)
	return total + threads, err
}

// softirq tells a thread that works for the kernel's soft interrupts.
func softirq(stat []byte) bool { return bytes.Contains(stat, []byte("(ksoftirqd/")) }

// processTime is the time of those processes that are wanted.
func processTime(wanted func(stat []byte) bool) (total time.Duration, err error) {
	paths, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return 0, fmt.Errorf("list processes: %w", err)
	}
	for _, path := range paths {
		stat, err := os.ReadFile(path)
		if err != nil || !wanted(stat) {
			continue // gone, or another process
		}
		ticks, err := statTicks(stat)
		if err != nil {
			return 0, fmt.Errorf("read %s: %w", path, err)
		}
		total += time.Duration(ticks) * time.Second / userHZ
	}
	return total, nil
}

// statTicks adds user and system time of a process and of its children that have ended, the 14th to the 17th field of /proc/<pid>/stat.
func statTicks(stat []byte) (int64, error) {
	end := bytes.LastIndexByte(stat, ')')
	fields := bytes.Fields(stat[end+1:])
	if end < 0 || len(fields) < 15 {
		return 0, fmt.Errorf("want at least 17 fields: %q", stat)
	}
	return sumOf(fields[11:15])
}

func sumOf(fields [][]byte) (sum int64, err error) {
	for _, field := range fields {
		n, err := strconv.ParseInt(string(field), 10, 64)
		if err != nil {
			return 0, fmt.Errorf("time: %w", err)
		}
		sum += n
	}
	return sum, nil
}
