// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

// userHZ is the number of ticks per second in /proc/stat and /proc/<pid>/stat on every architecture that Go supports.
const userHZ = 100

// The type processorTimes contains the idle and busy times of all processors since the boot. The kernel sends the queued packets of a
// bandwidth limit in a timer interrupt. The times of the sending and receiving processes therefore do not contain this work. The kernel
// adds the time of the interrupt to the interrupted process, usually the idle process.
type processorTimes struct {
	at     time.Time
	count  int
	idle   time.Duration
	others time.Duration // of processes that do not handle the packets
}

func readProcessors() (processorTimes, error) {
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return processorTimes{}, fmt.Errorf("read what processors did: %w", err)
	}
	p := processorTimes{at: time.Now()}
	if p.count, p.idle, err = idleTime(stat); err != nil {
		return p, fmt.Errorf("read what processors did: %w", err)
	}
	p.others, err = othersTime()
	return p, err
}

// idleTime returns the number of processors in /proc/stat and the sum of their idle times. The time in which a
// processor waits for a disk counts as idle time.
func idleTime(stat []byte) (count int, idle time.Duration, err error) {
	for line := range bytes.Lines(stat) {
		fields := bytes.Fields(line)
		if !bytes.HasPrefix(line, []byte("cpu")) || bytes.HasPrefix(line, []byte("cpu ")) || len(fields) < 6 {
			continue
		}
		ticks, err := sumOf(fields[4:6])
		if err != nil {
			return 0, 0, err
		}
		count++
		idle += time.Duration(ticks) * time.Second / userHZ
	}
	return count, idle, nil
}

// othersTime returns the processor time of all processes except this process and the kernel threads `ksoftirqd`, which handle packets.
func othersTime() (total time.Duration, err error) {
	paths, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return 0, fmt.Errorf("list processes: %w", err)
	}
	own := fmt.Appendf(nil, "%d ", os.Getpid())
	for _, path := range paths {
		stat, err := os.ReadFile(path)
		if err != nil || bytes.HasPrefix(stat, own) || bytes.Contains(stat, []byte("(ksoftirqd/")) {
			continue // the process has ended
		}
		ticks, err := statTicks(stat)
		if err != nil {
			return 0, fmt.Errorf("read %s: %w", path, err)
		}
		total += time.Duration(ticks) * time.Second / userHZ
	}
	return total, nil
}

// statTicks returns the sum of the fields 14 to 17 of /proc/<pid>/stat. Fields 14 to 17 are the user and system times of a process and of
// its ended children.
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

// timeSince returns the processor time that this process used, plus the processor time that the kernel used for the packets of this
// process. The returned time is the total time minus the idle time and minus the time of other processes. The result is 0 if the time is
// unknown. The time is unknown if the sum of the other processes' times has decreased. The sum decreases if a parent process never waits
// for its ended child, because the kernel then drops the child's times.
func (p processorTimes) timeSince(before processorTimes) time.Duration {
	others := p.others - before.others
	if others < 0 {
		return 0
	}
	return max(0, time.Duration(p.count)*p.at.Sub(before.at)-(p.idle-before.idle)-others)
}

// startSpending starts a measurement of processor time after the given delay. The returned function ends the measurement and returns the
// processor time.
func startSpending(after time.Duration) func() (time.Duration, error) {
	type reading struct {
		processorTimes
		err error
	}
	begin := make(chan reading, 1)
	time.AfterFunc(after, func() {
		p, err := readProcessors()
		begin <- reading{p, err}
	})
	return func() (time.Duration, error) {
		end, err := readProcessors()
		if begun := <-begin; err == nil && begun.err == nil {
			return end.timeSince(begun.processorTimes), nil
		} else if err == nil {
			err = begun.err
		}
		return 0, err
	}
}
