// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"encoding/json"
	"io"
	"os"
	"strings"
	"time"
)

const kubeletUser = "system:node:" + nodeName

type request struct {
	Verb       string
	RequestURI string
	User       struct{ Username string }
	ObjectRef  struct{ Resource, Subresource, Namespace, Name string }
	Response   struct{ Code int } `json:"responseStatus"`
	Received   time.Time          `json:"requestReceivedTimestamp"`
	Answered   time.Time          `json:"stageTimestamp"`
}

// isWrite reports whether the request changed an object in the API server.
func (r request) isWrite() bool {
	switch r.Verb {
	case "create", "update", "patch", "delete", "deletecollection":
		return r.Response.Code < 300
	}
	return false
}

// mark returns the size of the audit log, from which requests can read on.
func (l *lab) mark() int64 {
	l.Helper()
	info, err := os.Stat(auditLog(os.Getenv(dirEnv)))
	if err != nil {
		l.Fatal(err)
	}
	return info.Size()
}

// requests returns a user's requests in the audit log from a file position on, for one resource or, if it is "", for all.
func (l *lab) requests(since int64, user, resource string) (list []request) {
	l.Helper()
	file, err := os.Open(auditLog(os.Getenv(dirEnv)))
	if err != nil {
		l.Fatal(err)
	}
	defer file.Close()
	if _, err := file.Seek(since, io.SeekStart); err != nil {
		l.Fatal(err)
	}
	data, err := io.ReadAll(file)
	if err != nil {
		l.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		var r request
		if json.Unmarshal([]byte(line), &r) != nil {
			continue // the API server is still writing this line
		}
		if r.User.Username == user && (resource == "" || r.ObjectRef.Resource == resource) {
			list = append(list, r)
		}
	}
	return list
}

// writes returns the daemon's write requests for a resource, beginning at the position `since` of the audit log.
func (l *lab) writes(since int64, resource string) (list []request) {
	l.Helper()
	for _, r := range l.requests(since, account, resource) {
		if r.isWrite() {
			list = append(list, r)
		}
	}
	return list
}
