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

// userHZ is the unit of /proc/stat and /proc/<pid>/stat on every architecture that Go runs on.
const userHZ = 100

// processors tells what all of them did since the machine was started. Packets cost more than the processes that send and receive them are
// charged: a shaper sends what waits when a timer rings, on top of whatever runs, mostly of nothing.
type processors struct {
	at     time.Time
	count  int
	idle   time.Duration
	others time.Duration // of processes that have nothing to do with the packets
}

func readProcessors() (processors, error) {
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return processors{}, fmt.Errorf("read what processors did: %w", err)
	}
	p := processors{at: time.Now()}
	if p.count, p.idle, err = idleTime(stat); err != nil {
		return p, fmt.Errorf("read what processors did: %w", err)
	}
	p.others, err = othersTime()
	return p, err
}

// idleTime counts the processors of /proc/stat and adds what they idled. Waiting for a disk is idle too.
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

// othersTime is the time of all processes but this one and the threads that work for the kernel's soft interrupts.
func othersTime() (total time.Duration, err error) {
	paths, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return 0, fmt.Errorf("list processes: %w", err)
	}
	own := fmt.Appendf(nil, "%d ", os.Getpid())
	for _, path := range paths {
		stat, err := os.ReadFile(path)
		if err != nil || bytes.HasPrefix(stat, own) || bytes.Contains(stat, []byte("(ksoftirqd/")) {
			continue // an error: the process is gone
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

// since is the time that processors spent on this process and on packets: what no other process did. It is 0 where that is unknown, because
// the kernel drops the times of a process, and of all its children, if its parent never waited for it.
func (p processors) since(before processors) time.Duration {
	others := p.others - before.others
	if others < 0 {
		return 0
	}
	return max(0, time.Duration(p.count)*p.at.Sub(before.at)-(p.idle-before.idle)-others)
}

// spending begins to count after a while. What it returns ends that.
func spending(after time.Duration) func() (time.Duration, error) {
	type reading struct {
		processors
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
			return end.since(begun.processors), nil
		} else if err == nil {
			err = begun.err
		}
		return 0, err
	}
}
