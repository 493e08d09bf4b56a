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

// processorTimes are the idle and busy times of all processors since the boot. A bandwidth limit sends its queued packets in a timer
// interrupt, whose time is not that of the sender or receiver, but of the interrupted process, usually the idle one.
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

// idleTime returns the number of processors in /proc/stat and the sum of their idle times, which include waits for a disk.
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

// othersTime returns the processor time of all processes but this one and ksoftirqd, which handles packets.
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

// statTicks returns the sum of fields 14 to 17 of /proc/<pid>/stat: the user and system times of a process and of its ended children.
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

// timeSince returns the processor time of this process and of the kernel's work on its packets: the total without the idle time and the
// time of other processes. It returns 0 if their sum has decreased, as it does when the kernel drops the times of a child for which its
// parent never waited.
func (p processorTimes) timeSince(before processorTimes) time.Duration {
	others := p.others - before.others
	if others < 0 {
		return 0
	}
	return max(0, time.Duration(p.count)*p.at.Sub(before.at)-(p.idle-before.idle)-others)
}

// startSpending starts to measure processor time after a delay. The returned function ends the measurement.
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
